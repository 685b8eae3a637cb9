"""A durable ledger: the ledger in memory, with every change also written to a file.

Reads are answered from memory; a writer thread commits changes in their order. Who must not be
wrong about what survives waits for `durable`: a client's receipt or outcome, a leased batch, an
acknowledgement. All other changes may be lost with the process, from some moment on all of them:
their prompts are pending then, and their samples are generated again.

Stages are not written, since what they hold dies with the process: a prompt read back waits again,
or is leased. A data-set prompt that ended leaves its position; an ended client's prompt stays
whole until so many others have ended after it, without its images if it was not trained: only
those that were may be issued again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from services.reward.ledger.content import EndedPrompt, encode_body
from services.reward.ledger.ledger import ENDED_IDS_REMEMBERED, MemoryLedger
from services.reward.ledger.schema import (
    open_ledger_file,
    pack_rewards,
    read_content,
    read_trained_after,
    unusable,
)
from services.reward.ledger.writer import LedgerWriter, Statement
from sluice.errors import DataError, InvalidRequestError
from sluice.types import DataProgress, Prompt, PromptEnd, PromptOrigin

logger = logging.getLogger(__name__)

_ACCEPT = "INSERT INTO pending VALUES (?, ?, ?, ?)"
_NUMBER = "UPDATE ledger SET next_sequence = ?"
_LEAVE = "DELETE FROM pending WHERE prompt_id = ?"
_COUNT_END = (
    "INSERT INTO ends VALUES (?, 1) ON CONFLICT (prompt_end) DO UPDATE "
    "SET num_prompts = num_prompts + 1"
)
_REMEMBER = (
    "INSERT INTO ended (prompt_id, sequence, body, prompt_end, step, rewards, detail) "
    "SELECT prompt_id, sequence, body, ?, ?, ?, ? FROM pending WHERE prompt_id = ?"
)
_FORGET = "DELETE FROM ended WHERE prompt_id = ?"
_END_POSITION = "INSERT OR IGNORE INTO ended_positions VALUES (?)"
_LOW_WATER = "UPDATE ledger SET low_water = ?"
_BELOW = "DELETE FROM ended_positions WHERE position < ?"
_LEASE = "INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)"
_ACKNOWLEDGE = "INSERT INTO acknowledged (batch_id) VALUES (?)"
_COUNT_ACKNOWLEDGED = "UPDATE ledger SET num_acknowledged = ?"
_FORGET_ACKNOWLEDGED = "DELETE FROM acknowledged WHERE batch_id = ?"
_STRIKE = (
    "INSERT INTO strikes (key, strikes) VALUES (?, ?) ON CONFLICT (key) DO UPDATE "
    "SET strikes = excluded.strikes"
)
_FORGET_STRIKES = "DELETE FROM strikes WHERE key = ?"
_KEEP_IMAGE = "INSERT OR REPLACE INTO images VALUES (?, ?, ?)"
_FORGET_IMAGES = "DELETE FROM images WHERE prompt_id = ?"
_FORGET_LEFT_IMAGES = (
    "DELETE FROM images WHERE prompt_id NOT IN "
    "(SELECT prompt_id FROM pending UNION SELECT prompt_id FROM ended)"
)


class SqliteLedger(MemoryLedger):
    """A ledger in a file.

    Args:
        path: the file; it and its folder are made if missing.
        ended_ids: how many ended clients' prompts are remembered.

    Raises:
        DataError: the file is damaged, in use, of another program or of another format; from
            changes: it cannot be written any more.
    """

    def __init__(self, path: Path, ended_ids: int = ENDED_IDS_REMEMBERED) -> None:
        database = open_ledger_file(path)
        try:
            database.execute(_FORGET_LEFT_IMAGES)
            content = read_content(database)
        except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError) as error:
            database.close()
            raise unusable(path, error) from error
        super().__init__(ended_ids, content)
        self._path = path
        self._writer = LedgerWriter(database, partial(unusable, path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()

    async def failure(self) -> DataError:
        """Wait until the file cannot be written, and why: the service must not go on then."""
        return await self._writer.failure()

    def noted(self) -> int:
        """A ticket for all that was changed so far."""
        return self._writer.noted

    async def durable(self, change_number: int | None = None) -> None:
        """Wait until what `ticket` stands for (``None``: all) is on the disk.

        Raises:
            DataError: the file cannot be written.
            DeadlineError: the disk takes too long.
        """
        await self._writer.committed(self.noted() if change_number is None else change_number)

    def accept(self, prompt: Prompt) -> None:
        """Take a prompt on as ``WAITING``.

        Raises:
            InvalidRequestError: its id was used before, or a client's cannot be encoded.
        """
        body = self._body(prompt)
        super().accept(prompt)
        if body is not None:
            self._write(*_accepted(prompt, body), (_NUMBER, (self._sequence,)))

    def end(
        self,
        prompt_id: str,
        end: PromptEnd,
        *,
        step: int | None = None,
        rewards: Sequence[float] = (),
        detail: str = "",
    ) -> Prompt:
        """End a pending prompt; `NotFoundError` if it is not pending."""
        low_water = self._low_water
        prompt = super().end(prompt_id, end, step=step, rewards=rewards, detail=detail)
        statements: list[Statement] = [(_LEAVE, (prompt_id,)), (_COUNT_END, (end.value,))]
        if (ended := self.ended(prompt_id)) is not None:
            outcome = (end.value, step, pack_rewards(ended.rewards), ended.detail, prompt_id)
            statements.insert(0, (_REMEMBER, outcome))
        elif prompt.position is not None:
            statements += self._position_statements(prompt.position, low_water)
        if prompt.images and (ended is None or end is not PromptEnd.TRAINED):
            statements.append((_FORGET_IMAGES, (prompt_id,)))
        self._write(*statements)
        return prompt

    def restart_data(self, progress: DataProgress) -> DataProgress:
        """Take `progress` for what ended so far; returns where drawing resumes."""
        self._write(
            ("DELETE FROM ended_positions", ()),
            (_LOW_WATER, (progress.low_water,)),
            *((_END_POSITION, (position,)) for position in progress.ended_above),
        )
        return super().restart_data(progress)

    def forget_data(self) -> None:
        """Take back that data-set prompts were drawn which are pending: they are drawn again."""
        super().forget_data()
        self._write(
            ("DELETE FROM pending WHERE position IS NOT NULL", ()), (_FORGET_LEFT_IMAGES, ())
        )

    def lease(self, batch_id: str, version: int, prompt_ids: Sequence[str]) -> None:
        """Pending prompts are given to the trainer, in the one lease that is open."""
        super().lease(batch_id, version, prompt_ids)
        packed = msgspec.msgpack.encode(tuple(prompt_ids))
        self._write((_LEASE, (batch_id, version, packed)))

    def release_lease(self) -> tuple[Prompt, ...]:
        """The open lease is taken back: its prompts, ``WAITING`` from now on."""
        self._write(("DELETE FROM lease", ()))
        return super().release_lease()

    def acknowledge(self) -> None:
        """Close the open lease, all of whose prompts have ended as trained.

        Their ends reach the file first: a process that dies in between finds the lease open.
        """
        lease, before = self._lease, tuple(self._acknowledged)
        super().acknowledge()
        if lease is not None:
            forgotten = [each for each in before if each not in self._acknowledged]
            self._write(
                ("DELETE FROM lease", ()),
                (_ACKNOWLEDGE, (lease.batch_id,)),
                (_COUNT_ACKNOWLEDGED, (self._num_acknowledged,)),
                *((_FORGET_ACKNOWLEDGED, (each,)) for each in forgotten),
            )

    def begin_trainer(self, instance_id: str) -> None:
        """Note who trains."""
        super().begin_trainer(instance_id)
        self._write(("UPDATE ledger SET trainer = ?", (instance_id,)))

    async def trained_after(self, step: int) -> tuple[Prompt, ...]:
        """Clients' prompts among those that ended last which later steps trained."""
        prompts = await self._writer.read(partial(read_trained_after, step=step))
        return tuple(prompt for prompt in prompts if prompt.prompt_id in self._ended)

    def reissue(self, prompts: Iterable[Prompt]) -> None:
        """Accept ended clients' prompts once more, under their numbers."""
        chosen = tuple(prompts)
        super().reissue(chosen)
        for prompt in chosen:
            forget: Statement = (_FORGET, (prompt.prompt_id,))
            self._write(forget, *_accepted(prompt, encode_body(prompt)))

    def note_strikes(self, key: str, strikes: int) -> None:
        """A prompt has so many strikes now; of those with some the last are remembered."""
        self._write((_STRIKE, (key, strikes)) if strikes else (_FORGET_STRIKES, (key,)))
        super().note_strikes(key, strikes)

    def _remember(self, prompt_id: str, ended: EndedPrompt) -> None:
        oldest = next(iter(self._ended), None)
        super()._remember(prompt_id, ended)
        if oldest is not None and oldest not in self._ended:
            self._write((_FORGET, (oldest,)), (_FORGET_IMAGES, (oldest,)))

    def _position_statements(self, position: int, low_water: int) -> list[Statement]:
        if self._low_water == low_water:
            return [(_END_POSITION, (position,))] if position > low_water else []
        return [(_LOW_WATER, (self._low_water,)), (_BELOW, (self._low_water,))]

    def _body(self, prompt: Prompt) -> bytes | None:
        """``None``: a row that no scorer can be sent either; after a restart it is drawn anew."""
        try:
            return encode_body(prompt)
        except InvalidRequestError as error:
            if prompt.origin is PromptOrigin.CLIENT:
                raise
            logger.warning("%s: %s", prompt.place, error)
            return None

    def _write(self, *statements: Statement) -> None:
        self._writer.write(statements)


def _accepted(prompt: Prompt, body: bytes) -> list[Statement]:
    keep: list[Statement] = [
        (_KEEP_IMAGE, (prompt.prompt_id, place, image)) for place, image in enumerate(prompt.images)
    ]
    return [(_ACCEPT, (*_row(prompt), body)), *keep]


def _row(prompt: Prompt) -> tuple[str, int, int | None]:
    return prompt.prompt_id, prompt.sequence, prompt.position
