"""Store leased samples in the ledger's file: each lease with its committed turns and its end, until
the prompt ends or the attempt is given up.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from services.reward.ledger.writer import Statement
from sluice.types import (
    Answer,
    ChatMessage,
    EpisodeEnd,
    FinishReason,
    TokenIds,
    Tool,
    Turn,
    VersionSpan,
)

logger = logging.getLogger(__name__)

_OF_SAMPLE = "prompt_id = ? AND sample_index = ?"
_FORGET = (
    "DELETE FROM lease_turns WHERE lease_id IN (SELECT lease_id FROM sample_leases WHERE {})",
    "DELETE FROM sample_leases WHERE {}",
)
_TAKE = "INSERT INTO sample_leases VALUES (?, ?, ?, ?, ?, ?, NULL, NULL, NULL)"
_COMMIT = "INSERT INTO lease_turns VALUES (?, ?, ?, ?)"
_KEEP_PROMPT = "UPDATE sample_leases SET prompt_token_ids = ? WHERE lease_id = ?"
_LIMIT = "UPDATE sample_leases SET reached_limit = ? WHERE lease_id = ?"
_END = "UPDATE sample_leases SET posted_end = ? WHERE lease_id = ?"
_TURNS = "SELECT lease_id, digest, body FROM lease_turns ORDER BY turn"
_LEASES = (
    "SELECT prompt_id, sample_index, lease_id, expires_s, holder, keep_alive_s, prompt_token_ids, "
    "reached_limit, posted_end FROM sample_leases"
)
_FORGET_LEFT = (
    "DELETE FROM sample_leases WHERE prompt_id NOT IN (SELECT prompt_id FROM pending)",
    "DELETE FROM lease_turns WHERE lease_id NOT IN (SELECT lease_id FROM sample_leases)",
)


@dataclass(frozen=True, slots=True)
class PostedEnd:
    """How a program ended its sample.

    Args:
        reward: a finite number; ``None`` to let scorers grade the last answer.
        failure: why the program failed; empty if it did not.
    """

    reward: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class CommittedTurn:
    """A turn that a program may have seen.

    Args:
        messages: the messages that its request adds to the turn that it continues; for a root, all
            messages.
        num_read: tokens that the policy read.
        prompt_token_ids: the prompt of its group, [prompt tokens].
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    turn: Turn
    num_read: int
    prompt_token_ids: TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class LeaseRecord:
    """A leased sample.

    Args:
        lease_id: secret.
        expires_s: when the lease expires, seconds since 1970.
        turns: the turns by the digest of their request, in the order of the calls.
        end: the posted end, if any.
        limit: the limit that the sample has reached; ``None`` if it takes further requests.
        holder: id of its holder; empty for an unnamed one.
        keep_alive_s: seconds without a call of the holder after which it fails; 0 for no limit.
    """

    lease_id: str
    prompt_id: str
    sample_index: int
    expires_s: float
    turns: Mapping[str, CommittedTurn] = field(default_factory=dict)
    end: PostedEnd | None = None
    limit: EpisodeEnd | None = None
    holder: str = ""
    keep_alive_s: float = 0.0


class _LeaseBody(msgspec.Struct, frozen=True, array_like=True):
    """A committed turn. Arrays are little-endian: uint32, and float32 for logprobs."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    token_ids: bytes
    behavior_logprobs: bytes
    version_spans: tuple[tuple[int, int, int], ...]
    finish_reason: FinishReason
    text: str
    answer: Answer | None
    parent: int | None
    context: bytes
    is_new_root: bool
    num_read: int


class StoredLeases:
    """The leases of pending prompts.

    Args:
        write: writes one change to the file.
        is_pending: returns whether a prompt is pending; leases of other prompts are not kept.
        restored: the leases in the file.

    Attributes:
        restored: the leases of an earlier service.
        on_revoked: called with the id of each prompt whose leases are dropped.
    """

    def __init__(
        self,
        write: Callable[..., None],
        is_pending: Callable[[str], bool],
        restored: Sequence[LeaseRecord] = (),
    ) -> None:
        self._write, self._is_pending = write, is_pending
        self.restored: Sequence[LeaseRecord] = restored
        self.on_revoked: Callable[[str], None] = lambda _prompt_id: None
        self._prompts = {record.prompt_id for record in restored}

    def add_lease(self, record: LeaseRecord) -> bool:
        """Keep a new lease, replacing the sample's earlier one; return whether it is kept."""
        if not self._is_pending(record.prompt_id):
            return False
        self._prompts.add(record.prompt_id)
        sample = (record.prompt_id, record.sample_index)
        lasts = (record.expires_s, record.holder, record.keep_alive_s)
        self._write(
            *_forget(_OF_SAMPLE, sample),
            (_TAKE, (*sample, record.lease_id, *lasts)),
        )
        return True

    def drop_lease(self, lease_id: str) -> None:
        """Drop a lease that no program received."""
        self._write(*_forget("lease_id = ?", (lease_id,)))

    def add_turn(self, lease_id: str, number: int, digest: str, turn: CommittedTurn) -> None:
        """Keep a turn of a kept lease by its number; with the first turn also the prompt."""
        statements: list[Statement] = [(_COMMIT, (lease_id, number, digest, encode_turn(turn)))]
        if number == 0:
            prompt = turn.prompt_token_ids.astype("<u4").tobytes()
            statements.append((_KEEP_PROMPT, (prompt, lease_id)))
        self._write(*statements)

    def set_limit(self, lease_id: str, limit: EpisodeEnd) -> None:
        """Record that a kept lease takes no further request."""
        self._write((_LIMIT, (limit.value, lease_id)))

    def set_end(self, lease_id: str, end: PostedEnd) -> None:
        """Record the end of a kept lease."""
        self._write((_END, (msgspec.msgpack.encode(end), lease_id)))

    def revoke(self, prompt_id: str) -> None:
        """Drop the leases of a prompt."""
        if prompt_id in self._prompts:
            self._prompts.discard(prompt_id)
            self._write(*_forget("prompt_id = ?", (prompt_id,)))
            self.on_revoked(prompt_id)

    def revoke_all(self) -> None:
        """Drop all leases."""
        for prompt_id in list(self._prompts):
            self.revoke(prompt_id)


def _forget(which: str, values: tuple[object, ...]) -> list[Statement]:
    return [(statement.format(which), values) for statement in _FORGET]


def read_leases(database: sqlite3.Connection) -> tuple[LeaseRecord, ...]:
    """Return the file's leases.

    Drop leases whose prompts are not pending. If a lease cannot be read, warn and drop all leases
    of its prompt: its samples are generated again.

    Raises:
        sqlite3.Error: the file is damaged.
    """
    for statement in _FORGET_LEFT:
        database.execute(statement)
    turns: dict[str, list[tuple[str, bytes]]] = {}
    for lease_id, digest, body in database.execute(_TURNS):
        turns.setdefault(lease_id, []).append((digest, body))
    by_prompt: dict[str, list[LeaseRecord]] = {}
    unreadable: dict[str, str] = {}
    for prompt_id, sample_index, lease_id, *columns in database.execute(_LEASES):
        sample = (lease_id, prompt_id, sample_index)
        try:
            record = _record(sample, turns.get(lease_id, ()), *columns)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            unreadable[prompt_id] = str(error)
        else:
            by_prompt.setdefault(prompt_id, []).append(record)
    for prompt_id, why in unreadable.items():
        logger.warning(
            "ledger: a lease of prompt %s cannot be read, its samples are generated again: %s",
            *(prompt_id, why),
        )
        by_prompt.pop(prompt_id, None)
        for sql, values in _forget("prompt_id = ?", (prompt_id,)):
            database.execute(sql, values)
    return tuple(record for records in by_prompt.values() for record in records)


def _record(
    sample: tuple[str, str, int],
    turns: Iterable[tuple[str, bytes]],
    expires_s: float,
    holder: str,
    keep_alive_s: float,
    prompt: bytes | None,
    limit: str | None,
    end: bytes | None,
) -> LeaseRecord:
    prompt_token_ids = np.frombuffer(prompt or b"", "<u4")
    return LeaseRecord(
        *sample,
        expires_s,
        {digest: decode_turn(body, prompt_token_ids) for digest, body in turns},
        None if end is None else msgspec.msgpack.decode(end, type=PostedEnd),
        None if limit is None else EpisodeEnd(limit),
        holder,
        keep_alive_s,
    )


def encode_turn(committed: CommittedTurn) -> bytes:
    """Encode a turn without its group's prompt, experts, reward and seconds."""
    turn = committed.turn
    return msgspec.msgpack.encode(
        _LeaseBody(
            committed.messages,
            committed.tools,
            turn.token_ids.astype("<u4").tobytes(),
            turn.behavior_logprobs.astype("<f4").tobytes(),
            tuple((span.version, span.start, span.end) for span in turn.version_spans),
            turn.finish_reason,
            turn.text,
            turn.answer,
            turn.parent,
            turn.context.astype("<u4").tobytes(),
            turn.is_new_root,
            committed.num_read,
        )
    )


def decode_turn(body: bytes, prompt_token_ids: TokenIds) -> CommittedTurn:
    """Decode a turn of a group with this prompt, [prompt tokens].

    Raises:
        msgspec.MsgspecError, ValueError: the bytes encode no turn.
    """
    decoded = msgspec.msgpack.decode(body, type=_LeaseBody)
    turn = Turn(
        np.frombuffer(decoded.token_ids, "<u4"),
        np.frombuffer(decoded.behavior_logprobs, "<f4"),
        tuple(VersionSpan(*span) for span in decoded.version_spans),
        decoded.finish_reason,
        decoded.text,
        answer=decoded.answer,
        parent=decoded.parent,
        context=np.frombuffer(decoded.context, "<u4"),
        is_new_root=decoded.is_new_root,
    )
    return CommittedTurn(decoded.messages, decoded.tools, turn, decoded.num_read, prompt_token_ids)
