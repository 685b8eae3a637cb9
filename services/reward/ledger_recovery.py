"""Reads what a ledger file says: the content that a restarted reward service goes on from."""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec

from services.reward.ledger_content import (
    EndedPrompt,
    LedgerContent,
    OpenLease,
    body_digest,
    decode_prompt,
)
from services.reward.received_samples import ReceivedSamples
from services.reward.sample_parts import decode_samples
from sluice.types import DataProgress, Prompt, PromptEnd

_REWARD = "d"  # float64


def read_content(database: sqlite3.Connection) -> LedgerContent:
    """All of it.

    Raises:
        sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError: the file is damaged.
    """
    next_sequence, low_water, num_acknowledged, trainer = database.execute(
        "SELECT next_sequence, low_water, num_acknowledged, trainer FROM ledger"
    ).fetchone()
    above = database.execute("SELECT position FROM ended_positions ORDER BY position")
    by_end = database.execute("SELECT prompt_end, num_prompts FROM ends")
    acknowledged = database.execute("SELECT batch_id FROM acknowledged ORDER BY number")
    return LedgerContent(
        next_sequence,
        _pending(database),
        _ended(database),
        {PromptEnd(name): count for name, count in by_end},
        DataProgress(low_water, tuple(position for (position,) in above)),
        _lease(database),
        tuple(batch_id for (batch_id,) in acknowledged),
        num_acknowledged,
        trainer,
        dict(database.execute("SELECT key, strikes FROM strikes ORDER BY number").fetchall()),
    )


def read_samples(
    database: sqlite3.Connection,
) -> tuple[dict[str, ReceivedSamples], Counter[str]]:
    """What was received of the samples of pending prompts, and the bytes it takes, by prompt id.

    Raises:
        sqlite3.Error, msgspec.MsgspecError, ValueError: the file is damaged.
    """
    rows = database.execute(
        "SELECT prompt_id, samples.body FROM samples JOIN pending USING (prompt_id) "
        "ORDER BY samples.number"
    ).fetchall()
    sizes = Counter[str]()
    for prompt_id, body in rows:
        sizes[prompt_id] += len(body)
    return decode_samples(rows), sizes


def read_trained_after(database: sqlite3.Connection, step: int) -> tuple[Prompt, ...]:
    """Clients' prompts that steps after `step` trained, in the order of issue."""
    rows = database.execute(
        "SELECT prompt_id, sequence, body FROM ended "
        "WHERE step > ? AND prompt_end = ? ORDER BY sequence",
        (step, PromptEnd.TRAINED.value),
    ).fetchall()
    return tuple(
        decode_prompt(name, sequence, None, body, _images(database, name))
        for name, sequence, body in rows
    )


def pack_rewards(rewards: Sequence[float]) -> bytes:
    """Rewards as a column holds them: float64."""
    return array(_REWARD, rewards).tobytes()


def _pending(database: sqlite3.Connection) -> tuple[Prompt, ...]:
    rows = database.execute(
        "SELECT prompt_id, sequence, position, body FROM pending ORDER BY sequence"
    ).fetchall()
    return tuple(
        decode_prompt(name, sequence, position, body, _images(database, name))
        for name, sequence, position, body in rows
    )


def _images(database: sqlite3.Connection, prompt_id: str) -> tuple[bytes, ...]:
    rows = database.execute(
        "SELECT image FROM images WHERE prompt_id = ? ORDER BY place", (prompt_id,)
    )
    return tuple(image for (image,) in rows)


def _ended(database: sqlite3.Connection) -> dict[str, EndedPrompt]:
    rows = database.execute(
        "SELECT prompt_id, sequence, body, prompt_end, step, rewards, detail FROM ended "
        "ORDER BY number"
    )
    return {
        prompt_id: EndedPrompt(
            sequence,
            body_digest(body),
            PromptEnd(end),
            step,
            tuple(_unpacked(rewards)),
            detail,
        )
        for prompt_id, sequence, body, end, step, rewards, detail in rows
    }


def _unpacked(packed: bytes) -> array[float]:
    rewards: array[float] = array(_REWARD)
    rewards.frombytes(packed)
    return rewards


def _lease(database: sqlite3.Connection) -> OpenLease | None:
    row = database.execute("SELECT batch_id, version, prompt_ids FROM lease").fetchone()
    if row is None:
        return None
    batch_id, version, packed = row
    return OpenLease(batch_id, version, msgspec.msgpack.decode(packed, type=tuple[str, ...]))
