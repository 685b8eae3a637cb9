"""The ledger: accepted prompts, how they ended, the open lease, strikes and the data progress.

Invariant 1: an accepted prompt is pending until it ends in exactly one `PromptEnd`; submitted =
ended + pending at every instant. The state of a pending prompt is not written: its samples die with
the process (`services.reward.group_table`), except samples leased to programs (`leases`). A prompt
read back from a file waits again or is leased.

The ledger answers from memory. With a file it also passes every change to a writer thread, which
commits the changes in order. Callers whose changes must survive wait for `durable`: for a client's
receipt or outcome, a leased batch, an acknowledgement. If the process dies, all other changes after
some moment may be lost. Their prompts are then pending, and their samples are generated again.

Of an ended data-set prompt the ledger keeps the position. An ended client's prompt stays whole
until `ended_ids` others have ended after it, but keeps its images only if it was trained, since it
may be issued again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from services.reward.ledger.leases import LeaseRecord, StoredLeases, read_leases
from services.reward.ledger.schema import (
    EndedPrompt,
    LedgerContent,
    OpenLease,
    SourcePositions,
    body_digest,
    encode_body,
    ledger_file,
    pack_rewards,
    read_content,
    read_trained_after,
)
from services.reward.ledger.writer import LedgerWriter, Statement
from sluice.errors import DataError, InvalidRequestError, NotFoundError
from sluice.types import DataProgress, Prompt, PromptEnd, PromptOrigin

logger = logging.getLogger(__name__)

ENDED_IDS_REMEMBERED = 65_536
"""How many ended clients' prompts are remembered: their ids cannot be reused. At 500 bytes each,
32 MiB."""
ACKNOWLEDGED_REMEMBERED = 64
"""How many of the last acknowledged batches may be acknowledged again after a restart."""
STRIKES_REMEMBERED = 65_536
"""How many prompts with strikes are remembered, those struck last."""
MAX_DETAIL_CHARS = 1000

_ACCEPT = "INSERT INTO pending VALUES (?, ?, ?, ?)"
_NUMBER = "UPDATE ledger SET next_sequence = ?"
_LEAVE = "DELETE FROM pending WHERE prompt_id = ?"
_FORGET_DATA = "DELETE FROM pending WHERE position IS NOT NULL"
_COUNT_END = (
    "INSERT INTO ends VALUES (?, 1) ON CONFLICT (prompt_end) DO UPDATE "
    "SET num_prompts = num_prompts + 1"
)
_REMEMBER = (
    "INSERT INTO ended (prompt_id, sequence, body, prompt_end, step, rewards, detail) "
    "SELECT prompt_id, sequence, body, ?, ?, ?, ? FROM pending WHERE prompt_id = ?"
)
_FORGET = "DELETE FROM ended WHERE prompt_id = ?"
_LEASE = "INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?)"
_FORGET_LEASE = "DELETE FROM lease"
_NEWEST_LEASE = "INSERT OR REPLACE INTO newest_lease VALUES (1, ?)"
_FORGET_NEWEST_LEASE = "DELETE FROM newest_lease"
_ACKNOWLEDGE = "INSERT INTO acknowledged (batch_id) VALUES (?)"
_COUNT_ACKNOWLEDGED = "UPDATE ledger SET num_acknowledged = ?"
_FORGET_ACKNOWLEDGED = "DELETE FROM acknowledged WHERE batch_id = ?"
_TRAINER = "UPDATE ledger SET trainer = ?"
_ROLLBACK = "INSERT OR REPLACE INTO rollbacks VALUES (?, ?)"
_FORGET_ROLLBACKS = "DELETE FROM rollbacks WHERE version > ?"
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


class PromptLedger:
    """The ledger of one run.

    Args:
        path: the file, created with its folder if missing; ``None`` keeps the ledger in memory
            only.
        ended_ids: how many ended clients' prompts are remembered.

    Attributes, which only this class writes:
        prompts: the pending prompts, by id.
        ended: the last ended clients' prompts, by id, the oldest first.
        num_submitted: prompts accepted so far.
        num_clients_pending: pending clients' prompts.
        client_image_bytes: images of these prompts, bytes.
        open_lease: the leased batch, even if leased before a restart.
        newest_leased_version: version of the newest batch leased and not voided since the trainer
            began, including by an earlier service; ``None`` without one.
        num_acknowledged: groups of all acknowledged batches.
        trainer: the instance of the trainer that announced itself last.
        leases: samples of pending prompts that are leased to programs.
        all_strikes: the strikes in a row of each prompt that has any, by `prompt_key`.

    Raises:
        DataError: the file is damaged, in use, of another program or of another format; from a
            change: the file can no longer be written.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        ended_ids: int = ENDED_IDS_REMEMBERED,
    ) -> None:
        self._writer: LedgerWriter | None = None
        content, leases = LedgerContent(), tuple[LeaseRecord, ...]()
        if path is not None:
            file = ledger_file(path)
            database = file.open()
            try:
                database.execute(_FORGET_LEFT_IMAGES)
                content = read_content(database)
                leases = read_leases(database)
            except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError) as error:
                database.close()
                raise file.unusable(error) from error
            self._writer = LedgerWriter(database, file.unusable)
        self._sequence = content.next_sequence
        self.prompts = {prompt.prompt_id: prompt for prompt in content.pending}
        self.leases = StoredLeases(self._write, self.prompts.__contains__, leases)
        self.num_clients_pending = sum(p.origin is PromptOrigin.CLIENT for p in content.pending)
        self.client_image_bytes = sum(map(_client_image_bytes, content.pending))
        self._max_ended_ids = ended_ids
        self.ended: OrderedDict[str, EndedPrompt] = OrderedDict(content.ended)
        self._by_end: Counter[PromptEnd] = Counter(content.by_end)
        self.num_submitted = sum(self._by_end.values()) + len(self.prompts)
        self._positions = SourcePositions(content.progress)
        self._acknowledged: OrderedDict[str, None] = OrderedDict.fromkeys(content.acknowledged)
        self.num_acknowledged = content.num_acknowledged
        self.trainer = content.trainer
        self.open_lease = content.lease
        self.newest_leased_version = content.newest_leased_version
        self.all_strikes: OrderedDict[str, int] = OrderedDict(content.strikes)
        self._rollbacks = dict(content.rollbacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()

    async def failure(self) -> DataError:
        """Wait until the file can no longer be written; return why. The service must then end."""
        assert self._writer is not None
        return await self._writer.failure()

    @property
    def has_file(self) -> bool:
        """Whether the ledger survives the process."""
        return self._writer is not None

    def last_change(self) -> int:
        """Return the number of the last change."""
        return self._writer.noted if self._writer is not None else 0

    async def durable(self, change_number: int | None = None) -> None:
        """Wait until the changes up to this number (``None``: all) are on disk.

        Raises:
            DataError: the file cannot be written.
            DeadlineError: the disk takes too long.
        """
        if self._writer is not None:
            await self._writer.wait_until_committed(
                self.last_change() if change_number is None else change_number
            )

    # ------------------------------------------------------------------------------------ prompts

    @property
    def num_pending(self) -> int:
        """The number of prompts accepted and not ended."""
        return len(self.prompts)

    @property
    def by_end(self) -> Mapping[PromptEnd, int]:
        """The number of ended prompts, by how they ended."""
        return {end: self._by_end[end] for end in PromptEnd}

    def next_sequence(self) -> int:
        """Return the number of the next prompt in the order of issue."""
        self._sequence += 1
        return self._sequence - 1

    def pending(self) -> tuple[Prompt, ...]:
        """Return the pending prompts in the order of issue."""
        return tuple(sorted(self.prompts.values(), key=lambda prompt: prompt.sequence))

    def check_unused(self, prompt_id: str) -> None:
        """Raise `InvalidRequestError` if a pending or remembered prompt has this id."""
        if prompt_id in self.prompts or prompt_id in self.ended:
            raise InvalidRequestError(
                f"prompt_id '{prompt_id}' was used before; choose a new one for each prompt"
            )

    def accept(self, prompt: Prompt) -> None:
        """Accept a prompt.

        Raises:
            InvalidRequestError: a pending or recently ended client's prompt has this id, or a
                client's prompt cannot be encoded.
        """
        body, is_client = None, prompt.origin is PromptOrigin.CLIENT
        if self._writer is not None or is_client:
            try:
                body = encode_body(prompt)
            except InvalidRequestError as error:
                if is_client:
                    raise
                # Such a row cannot be sent to scorers either. A restarted service issues it again.
                logger.warning("%s: %s", prompt.place, error)
        self.check_unused(prompt.prompt_id)
        self._add(prompt)
        if body is not None and self._writer is not None:
            self._write(*_insert_prompt(prompt, body), (_NUMBER, (self._sequence,)))

    def end(
        self,
        prompt_id: str,
        end: PromptEnd,
        *,
        step: int | None = None,
        rewards: Sequence[float] = (),
        detail: str = "",
    ) -> Prompt:
        """End a pending prompt and return it.

        Args:
            step: the train step that used it.
            rewards: of its samples.
            detail: more text, cut to `MAX_DETAIL_CHARS`.

        Raises:
            NotFoundError: the prompt is not pending.
        """
        if prompt_id not in self.prompts:
            raise NotFoundError(f"prompt '{prompt_id}' is not pending")
        prompt = self._remove(prompt_id)
        self.leases.revoke(prompt_id)
        self._by_end[end] += 1
        statements, forgotten = list[Statement](), None
        is_client = prompt.origin is PromptOrigin.CLIENT
        digest = body_digest(encode_body(prompt)) if is_client else b""
        detail = detail[:MAX_DETAIL_CHARS]
        ended_prompt = EndedPrompt(prompt.sequence, digest, end, step, tuple(rewards), detail)
        if is_client:
            self.ended[prompt_id] = ended_prompt
            if len(self.ended) > self._max_ended_ids:
                forgotten, _ = self.ended.popitem(last=False)
        elif prompt.position is not None:
            statements = self._positions.end(prompt.source, prompt.position)
        if self._writer is not None:
            self._write_end(prompt, ended_prompt, forgotten, statements)
        return prompt

    def _write_end(
        self,
        prompt: Prompt,
        ended_prompt: EndedPrompt,
        forgotten: str | None,
        of_position: Sequence[Statement],
    ) -> None:
        """Write a prompt's end.

        Args:
            forgotten: an earlier ended prompt that the ledger forgets in exchange.
            of_position: the statements that record the end of its row.
        """
        prompt_id, is_client = prompt.prompt_id, prompt.origin is PromptOrigin.CLIENT
        statements: list[Statement] = [
            (_LEAVE, (prompt_id,)),
            (_COUNT_END, (ended_prompt.end.value,)),
        ]
        if is_client:  # first, as it copies the pending row
            rewards = pack_rewards(ended_prompt.rewards)
            outcome = (
                ended_prompt.end.value,
                ended_prompt.step,
                rewards,
                ended_prompt.detail,
                prompt_id,
            )
            statements.insert(0, (_REMEMBER, outcome))
        if forgotten is not None:
            statements += [(_FORGET, (forgotten,)), (_FORGET_IMAGES, (forgotten,))]
        statements += of_position
        if prompt.images and not (is_client and ended_prompt.end is PromptEnd.TRAINED):
            statements.append((_FORGET_IMAGES, (prompt_id,)))
        self._write(*statements)

    async def trained_after(self, step: int) -> tuple[Prompt, ...]:
        """Return the clients' prompts that later steps trained, if still remembered whole.

        A ledger in memory keeps none of them.
        """
        if self._writer is None:
            return ()
        prompts = await self._writer.read(partial(read_trained_after, step=step))
        return tuple(prompt for prompt in prompts if prompt.prompt_id in self.ended)

    def reissue(self, prompts: Iterable[Prompt]) -> None:
        """Accept ended clients' prompts once more, under their numbers."""
        for prompt in prompts:
            del self.ended[prompt.prompt_id]
            self._add(prompt)
            self._write(
                (_FORGET, (prompt.prompt_id,)), *_insert_prompt(prompt, encode_body(prompt))
            )

    # ----------------------------------------------------------------------------------- data set

    def progress(self, also_ended: Iterable[Prompt] = ()) -> DataProgress:
        """Return the data-set positions that ended, including those of the prompts `also_ended`."""
        return self._positions.progress(also_ended)

    def restart_data(self, progress: DataProgress) -> DataProgress:
        """Replace the ended positions by `progress`, as after a trainer's resume.

        Returns:
            where the data set continues: after ended positions and positions pending here.
        """
        self._positions = SourcePositions(progress)
        self._write(*self._positions.rewrite_statements())
        return self.progress(self.prompts.values())

    def forget_data(self) -> None:
        """Forget pending data-set prompts, whose rows will be issued again."""
        for prompt in self.pending():
            if prompt.position is not None:
                self._remove(prompt.prompt_id)
                self.leases.revoke(prompt.prompt_id)
                self.num_submitted -= 1
        self._write((_FORGET_DATA, ()), (_FORGET_LEFT_IMAGES, ()))

    # -------------------------------------------------------------------------------------- lease

    def lease(self, batch_id: str, version: int, prompt_ids: Sequence[str]) -> None:
        """Lease pending prompts to the trainer. Only one lease is open at a time.

        Raises:
            NotFoundError: a prompt is not pending.
        """
        missing_ids = [prompt_id for prompt_id in prompt_ids if prompt_id not in self.prompts]
        if missing_ids:
            raise NotFoundError(f"prompt '{missing_ids[0]}' is not pending")
        self.open_lease = OpenLease(batch_id, version, tuple(prompt_ids))
        self.newest_leased_version = version
        packed = msgspec.msgpack.encode(self.open_lease.prompt_ids)
        self._write((_LEASE, (batch_id, version, packed)))

    def is_leased(self, batch_id: str) -> bool:
        """Return whether a batch is the open lease; ``False`` if it was acknowledged before.

        Raises:
            NotFoundError: the batch is neither open nor among the last acknowledged ones.
        """
        if batch_id in self._acknowledged:
            return False
        if self.open_lease is None or self.open_lease.batch_id != batch_id:
            raise not_leased(batch_id)
        return True

    def leased_ids(self) -> tuple[str, ...]:
        """Return the pending prompts of the open lease; none without one."""
        prompt_ids = self.open_lease.prompt_ids if self.open_lease else ()
        return tuple(prompt_id for prompt_id in prompt_ids if prompt_id in self.prompts)

    def void_lease(self) -> None:
        """Void the open lease, if any: its prompts are pending again."""
        statements: list[Statement] = [(_FORGET_LEASE, ())]
        if self.open_lease is not None:
            self.newest_leased_version = self.open_lease.version - 1
            statements.append((_NEWEST_LEASE, (self.newest_leased_version,)))
        self.open_lease = None
        self._write(*statements)

    def acknowledge(self) -> None:
        """Close the open lease after all its prompts have ended as trained.

        Their ends reach the file first: a process that dies in between finds the lease open.
        """
        lease = self.open_lease
        if lease is None:
            return
        self.num_acknowledged += len(lease.prompt_ids)
        self._acknowledged[lease.batch_id] = None
        statements: list[Statement] = [
            (_FORGET_LEASE, ()),
            (_NEWEST_LEASE, (lease.version,)),
            (_ACKNOWLEDGE, (lease.batch_id,)),
            (_COUNT_ACKNOWLEDGED, (self.num_acknowledged,)),
        ]
        if len(self._acknowledged) > ACKNOWLEDGED_REMEMBERED:
            oldest, _ = self._acknowledged.popitem(last=False)
            statements.append((_FORGET_ACKNOWLEDGED, (oldest,)))
        self.open_lease = None
        self._write(*statements)

    def begin_trainer(self, instance_id: str, version: int) -> None:
        """Note a new trainer instance, which has leased nothing yet and begins with `version`.

        Drop the leased samples: their turns may come from a newer policy than the trainer's.
        """
        self.leases.revoke_all()
        self.trainer = instance_id
        self.newest_leased_version = self.open_lease.version if self.open_lease else None
        self._rollbacks = {v: restored for v, restored in self._rollbacks.items() if v <= version}
        self._write(
            (_TRAINER, (instance_id,)), (_FORGET_ROLLBACKS, (version,)), (_FORGET_NEWEST_LEASE, ())
        )

    # ---------------------------------------------------------------------------------- rollbacks

    @property
    def num_rollbacks(self) -> int:
        """Return how many versions have the weights of an earlier one."""
        return len(self._rollbacks)

    def is_rolled_back(self, version: int) -> bool:
        """Return whether `note_rollback` was called for a version."""
        return version in self._rollbacks

    def note_rollback(self, version: int, restored: int) -> None:
        """Note that a version has the weights of the earlier version `restored`."""
        self._rollbacks[version] = restored
        self._write((_ROLLBACK, (version, restored)))

    # ------------------------------------------------------------------------------------ strikes

    def note_strikes(self, key: str, strikes: int) -> None:
        """Set a prompt's strikes; remember only the prompts struck last."""
        self._write((_STRIKE, (key, strikes)) if strikes else (_FORGET_STRIKES, (key,)))
        self.all_strikes.pop(key, None)
        if strikes:
            self.all_strikes[key] = strikes
        if len(self.all_strikes) > STRIKES_REMEMBERED:
            self.note_strikes(next(iter(self.all_strikes)), 0)

    def _add(self, prompt: Prompt) -> None:
        self.prompts[prompt.prompt_id] = prompt
        self.num_clients_pending += prompt.origin is PromptOrigin.CLIENT
        self.client_image_bytes += _client_image_bytes(prompt)
        self.num_submitted += 1

    def _remove(self, prompt_id: str) -> Prompt:
        prompt = self.prompts.pop(prompt_id)
        self.num_clients_pending -= prompt.origin is PromptOrigin.CLIENT
        self.client_image_bytes -= _client_image_bytes(prompt)
        return prompt

    def _write(self, *statements: Statement) -> None:
        """Pass a change to the writer: all its statements reach the file, or none."""
        if self._writer is not None:
            self._writer.write(statements)


def not_leased(batch_id: str) -> NotFoundError:
    """Return the error for a call that names a batch that is not leased."""
    return NotFoundError(
        f"batch '{batch_id}' is not leased (it was voided, or never existed); take the next batch"
    )


def _insert_prompt(prompt: Prompt, body: bytes) -> list[Statement]:
    images: list[Statement] = [
        (_KEEP_IMAGE, (prompt.prompt_id, place, image)) for place, image in enumerate(prompt.images)
    ]
    return [(_ACCEPT, (prompt.prompt_id, prompt.sequence, prompt.position, body)), *images]


def _client_image_bytes(prompt: Prompt) -> int:
    """Count the bytes of a client's images; running groups limit the data set's images."""
    if prompt.origin is not PromptOrigin.CLIENT:
        return 0
    return sum(map(len, prompt.images))
