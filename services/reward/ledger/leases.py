"""Leased samples in the ledger's file: a lease with its committed turns and its end, until its
prompt ends or its attempt is given up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from services.reward.ledger.writer import Statement
from sluice.types import Answer, ChatMessage, FinishReason, TokenIds, Tool, Turn, VersionSpan

_OF_SAMPLE = "prompt_id = ? AND sample_index = ?"
_FORGET = (
    "DELETE FROM lease_turns WHERE lease_id IN (SELECT lease_id FROM sample_leases WHERE {})",
    "DELETE FROM lease_holders WHERE lease_id IN (SELECT lease_id FROM sample_leases WHERE {})",
    "DELETE FROM sample_leases WHERE {}",
)
_TAKE = "INSERT INTO sample_leases VALUES (?, ?, ?, ?, NULL)"
_HOLD = "INSERT INTO lease_holders VALUES (?, ?, ?)"
_COMMIT = "INSERT INTO lease_turns VALUES (?, ?, ?, ?)"
_END = "UPDATE sample_leases SET posted_end = ? WHERE lease_id = ?"
_FORGET_LEFT = (
    "DELETE FROM sample_leases WHERE prompt_id NOT IN (SELECT prompt_id FROM pending)",
    "DELETE FROM lease_turns WHERE lease_id NOT IN (SELECT lease_id FROM sample_leases)",
    "DELETE FROM lease_holders WHERE lease_id NOT IN (SELECT lease_id FROM sample_leases)",
)


@dataclass(frozen=True, slots=True)
class PostedEnd:
    """How a program ended its sample.

    Args:
        reward: finite; ``None``: scorers grade the last answer.
        failure: why the program failed; empty: it did not.
    """

    reward: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class CommittedTurn:
    """A turn that a program may have seen.

    Args:
        messages: that its request adds to the turn that it continues; of a root, all of them.
        tools: that the policy could call.
        turn: what was sampled.
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
        prompt_id: of its group.
        sample_index: within its group.
        expires_s: when the lease expires, seconds since 1970.
        turns: by the digests of their requests, in the order of their calls.
        end: ``None``: none was posted.
        holder: who has leased it; empty: nobody in particular.
        keep_alive_s: seconds without a call of the holder after which it fails; 0: it does not.
    """

    lease_id: str
    prompt_id: str
    sample_index: int
    expires_s: float
    turns: Mapping[str, CommittedTurn] = field(default_factory=dict)
    end: PostedEnd | None = None
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
    prompt_token_ids: bytes


class KeptLeases:
    """The leases of pending prompts.

    Args:
        write: hands one change to the file.
        is_pending: returns whether a prompt is; leases of others are not kept.
        found: what the file holds.

    Attributes:
        found: what an earlier service left.
        on_revoked: called with the id of a prompt whose leases are dropped.
    """

    def __init__(
        self,
        write: Callable[..., None],
        is_pending: Callable[[str], bool],
        found: Sequence[LeaseRecord] = (),
    ) -> None:
        self._write, self._is_pending = write, is_pending
        self.found: Sequence[LeaseRecord] = found
        self.on_revoked: Callable[[str], None] = lambda _prompt_id: None
        self._prompts = {record.prompt_id for record in found}

    def taken(self, record: LeaseRecord) -> bool:
        """Keep a new lease, in place of the sample's earlier one; return whether it is kept."""
        if not self._is_pending(record.prompt_id):
            return False
        self._prompts.add(record.prompt_id)
        sample = (record.prompt_id, record.sample_index)
        self._write(
            *_forget(_OF_SAMPLE, sample),
            (_TAKE, (*sample, record.lease_id, record.expires_s)),
            (_HOLD, (record.lease_id, record.holder, record.keep_alive_s)),
        )
        return True

    def committed(self, lease_id: str, number: int, digest: str, turn: CommittedTurn) -> None:
        """Keep the turn with this number of a kept lease."""
        self._write((_COMMIT, (lease_id, number, digest, encode_turn(turn))))

    def ended(self, lease_id: str, end: PostedEnd) -> None:
        """Keep the end of a kept lease."""
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
    return [(each.format(which), values) for each in _FORGET]


def read_leases(database: sqlite3.Connection) -> tuple[LeaseRecord, ...]:
    """Return the file's leases; drop those whose prompts are not pending.

    Raises:
        sqlite3.Error, msgspec.MsgspecError, ValueError: the file is damaged.
    """
    for statement in _FORGET_LEFT:
        database.execute(statement)
    turns: dict[str, dict[str, CommittedTurn]] = {}
    rows = database.execute("SELECT lease_id, digest, body FROM lease_turns ORDER BY turn")
    for lease_id, digest, body in rows:
        turns.setdefault(lease_id, {})[digest] = decode_turn(body)
    leases = database.execute(
        "SELECT prompt_id, sample_index, lease_id, expires_s, posted_end, "
        "coalesce(holder, ''), coalesce(keep_alive_s, 0.0) "
        "FROM sample_leases LEFT JOIN lease_holders USING (lease_id)"
    )
    return tuple(
        LeaseRecord(
            lease_id,
            prompt_id,
            sample_index,
            expires_s,
            turns.get(lease_id, {}),
            None if end is None else msgspec.msgpack.decode(end, type=PostedEnd),
            holder,
            keep_alive_s,
        )
        for prompt_id, sample_index, lease_id, expires_s, end, holder, keep_alive_s in leases
    )


def encode_turn(committed: CommittedTurn) -> bytes:
    """Encode a turn; experts, its reward and its seconds are left out."""
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
            committed.prompt_token_ids.astype("<u4").tobytes(),
        )
    )


def decode_turn(body: bytes) -> CommittedTurn:
    """Return the turn of a body.

    Raises:
        msgspec.MsgspecError, ValueError: the bytes are none.
    """
    found = msgspec.msgpack.decode(body, type=_LeaseBody)
    turn = Turn(
        np.frombuffer(found.token_ids, "<u4"),
        np.frombuffer(found.behavior_logprobs, "<f4"),
        tuple(VersionSpan(*span) for span in found.version_spans),
        found.finish_reason,
        found.text,
        answer=found.answer,
        parent=found.parent,
        context=np.frombuffer(found.context, "<u4"),
        is_new_root=found.is_new_root,
    )
    prompt = np.frombuffer(found.prompt_token_ids, "<u4")
    return CommittedTurn(found.messages, found.tools, turn, found.num_read, prompt)
