"""The content of a ledger and its file `<run_dir>/reward/ledger.sqlite`: tables, format, reading,
ended rows.

The file is in WAL mode, and every commit is synchronous, so it survives a crash of the machine.
Only one reward service at a time holds the file, by an exclusive lock that ends with its process.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec

from services.reward.ledger.writer import Statement
from services.reward.sqlite_file import SqliteFile
from sluice.errors import InvalidRequestError
from sluice.service_contract import LEDGER_FORMAT
from sluice.types import ChatMessage, DataProgress, Prompt, PromptEnd, PromptOrigin

APPLICATION_ID = 0x534C554C  # "SLUL"

_TABLES = """
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    next_sequence INTEGER NOT NULL,
    num_acknowledged INTEGER NOT NULL,
    trainer TEXT
);
INSERT INTO ledger VALUES (1, 0, 0, NULL);
CREATE TABLE pending (
    prompt_id TEXT PRIMARY KEY,
    sequence INTEGER NOT NULL,
    position INTEGER,
    body BLOB NOT NULL
);
CREATE TABLE ended (
    number INTEGER PRIMARY KEY,
    prompt_id TEXT NOT NULL UNIQUE,
    sequence INTEGER NOT NULL,
    body BLOB NOT NULL,
    prompt_end TEXT NOT NULL,
    step INTEGER,
    rewards BLOB NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX ended_by_step ON ended (step) WHERE step IS NOT NULL;
CREATE TABLE images (
    prompt_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    image BLOB NOT NULL,
    PRIMARY KEY (prompt_id, place)
);
CREATE TABLE ends (prompt_end TEXT PRIMARY KEY, num_prompts INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE source_progress (
    source TEXT PRIMARY KEY,
    low_water INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE ended_positions (
    source TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (source, position)
) WITHOUT ROWID;
CREATE TABLE lease (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    batch_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    prompt_ids BLOB NOT NULL
);
CREATE TABLE newest_lease (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL);
CREATE TABLE acknowledged (number INTEGER PRIMARY KEY, batch_id TEXT NOT NULL UNIQUE);
CREATE TABLE rollbacks (version INTEGER PRIMARY KEY, restored INTEGER NOT NULL);
CREATE TABLE strikes (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    strikes INTEGER NOT NULL
);
CREATE TABLE sample_leases (
    prompt_id TEXT NOT NULL,
    sample_index INTEGER NOT NULL,
    lease_id TEXT NOT NULL UNIQUE,
    expires_s REAL NOT NULL,
    holder TEXT NOT NULL,
    keep_alive_s REAL NOT NULL,
    prompt_token_ids BLOB,
    reached_limit TEXT,
    posted_end BLOB,
    PRIMARY KEY (prompt_id, sample_index)
);
CREATE TABLE lease_turns (
    lease_id TEXT NOT NULL,
    turn INTEGER NOT NULL,
    digest TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (lease_id, turn)
);
"""

# Statements that record which rows ended.
_END = "INSERT OR IGNORE INTO ended_positions VALUES (?, ?)"
_FORGET = "DELETE FROM ended_positions"
_FORGET_PROGRESS = "DELETE FROM source_progress"
_LOW_WATER = "INSERT OR REPLACE INTO source_progress VALUES (?, ?)"
_BELOW = "DELETE FROM ended_positions WHERE source = ? AND position < ?"
_DIGEST_BYTES = 16
_REWARD = "d"  # float64


def ledger_file(path: Path) -> SqliteFile:
    """Return the file of a ledger."""
    content = "the prompts that clients have submitted"
    return SqliteFile(
        path, "ledger", content, APPLICATION_ID, LEDGER_FORMAT, _TABLES, is_durable=True
    )


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """The content of a prompt; `images` holds the digests of the images, which are stored apart.

    In MessagePack, like the `extra_info` sent to scorers, so that a prompt read back gets the same
    grade. A JSON ground truth is an array that holds its text, so that other prompts keep the
    bytes, and digests, of earlier versions of sluice.
    """

    messages: tuple[tuple[str, str], ...]
    data_source: str
    ground_truth: str | tuple[str]
    extra_info: Mapping[str, object]
    place: str
    images: tuple[bytes, ...]
    source: str


@dataclass(frozen=True, slots=True)
class EndedPrompt:
    """A client's prompt that ended: the `digest` of its content, and its outcome."""

    sequence: int
    digest: bytes
    end: PromptEnd
    step: int | None
    rewards: tuple[float, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A batch for `version` that the trainer has leased but not acknowledged."""

    batch_id: str
    version: int
    prompt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerContent:
    """A ledger at one moment.

    `ended` are the clients' prompts that ended last, oldest first; `acknowledged` the batches that
    were acknowledged last, oldest first; `num_acknowledged` counts groups of all of them; `trainer`
    is the instance that announced itself last; `strikes` holds the strikes of prompts, by
    `prompt_key`; `rollbacks` the versions whose weights are those of an earlier one, with that one;
    `newest_leased_version` is that of the newest batch that the trainer leased.
    """

    next_sequence: int = 0
    pending: tuple[Prompt, ...] = ()
    ended: Mapping[str, EndedPrompt] = field(default_factory=dict)
    by_end: Mapping[PromptEnd, int] = field(default_factory=dict)
    progress: DataProgress = field(default_factory=lambda: DataProgress(0))
    lease: OpenLease | None = None
    acknowledged: tuple[str, ...] = ()
    num_acknowledged: int = 0
    trainer: str | None = None
    strikes: Mapping[str, int] = field(default_factory=dict)
    rollbacks: Mapping[int, int] = field(default_factory=dict)
    newest_leased_version: int | None = None


def encode_body(prompt: Prompt) -> bytes:
    """Encode the content of a prompt, and the digests of its images.

    Raises:
        InvalidRequestError: `extra_info` holds a value without an encoding.
    """
    body = _Body(
        tuple((turn.role, turn.content) for turn in prompt.messages),
        prompt.data_source,
        (prompt.ground_truth,) if prompt.truth_is_json else prompt.ground_truth,
        prompt.extra_info,
        prompt.place,
        tuple(map(body_digest, prompt.images)),
        prompt.source,
    )
    try:
        return msgspec.msgpack.encode(body)
    except (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequestError(
            f"prompt '{prompt.prompt_id}': extra_info cannot be kept ({error}); send texts, "
            "numbers of 64 bits, lists and mappings"
        ) from error


def decode_prompt(
    prompt_id: str,
    sequence: int,
    position: int | None,
    body: bytes,
    images: tuple[bytes, ...] = (),
) -> Prompt:
    """Return the prompt of a body and its images.

    Raises:
        msgspec.MsgspecError: the bytes are no body.
        ValueError: the images are not those of the body.
    """
    decoded = msgspec.msgpack.decode(body, type=_Body)
    if decoded.images != tuple(map(body_digest, images)):
        raise ValueError(f"prompt '{prompt_id}': its images are not those that were written")
    truth = decoded.ground_truth
    return Prompt(
        prompt_id=prompt_id,
        sequence=sequence,
        messages=tuple(ChatMessage(role, content) for role, content in decoded.messages),
        data_source=decoded.data_source,
        ground_truth=truth if isinstance(truth, str) else truth[0],
        origin=PromptOrigin.CLIENT if position is None else PromptOrigin.DATASET,
        position=position,
        extra_info=decoded.extra_info,
        place=decoded.place,
        images=images,
        source=decoded.source,
        truth_is_json=not isinstance(truth, str),
    )


def body_digest(body: bytes) -> bytes:
    """Return the BLAKE2b digest of a body or an image, 16 bytes, to recognise repeated content."""
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()


def read_content(database: sqlite3.Connection) -> LedgerContent:
    """Return all of the file's content.

    Raises:
        sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError: the file is damaged.
    """
    next_sequence, num_acknowledged, trainer = database.execute(
        "SELECT next_sequence, num_acknowledged, trainer FROM ledger"
    ).fetchone()
    by_end = database.execute("SELECT prompt_end, num_prompts FROM ends")
    acknowledged = database.execute("SELECT batch_id FROM acknowledged ORDER BY number")
    lease = _lease(database)
    closed = database.execute("SELECT version FROM newest_lease").fetchone()
    return LedgerContent(
        next_sequence,
        _read_pending(database),
        _read_ended(database),
        {PromptEnd(name): count for name, count in by_end},
        _progress(database),
        lease,
        tuple(batch_id for (batch_id,) in acknowledged),
        num_acknowledged,
        trainer,
        dict(database.execute("SELECT key, strikes FROM strikes ORDER BY number").fetchall()),
        dict(database.execute("SELECT version, restored FROM rollbacks").fetchall()),
        lease.version if lease else closed and closed[0],
    )


def _progress(database: sqlite3.Connection) -> DataProgress:
    rows = database.execute("SELECT source, position FROM ended_positions ORDER BY 1, 2")
    ended_above: dict[str, list[int]] = {}
    for source, position in rows:
        ended_above.setdefault(source, []).append(position)
    low_waters = dict(database.execute("SELECT source, low_water FROM source_progress").fetchall())
    by_source = {
        source: DataProgress(low_waters.get(source, 0), tuple(ended_above.get(source, ())))
        for source in sorted({"", *ended_above, *low_waters})
    }
    run_progress = by_source.pop("")
    return DataProgress(run_progress.low_water, run_progress.ended_above, by_source)


def read_trained_after(database: sqlite3.Connection, step: int) -> tuple[Prompt, ...]:
    """Return clients' prompts that steps after `step` trained, in the order of issue."""
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
    """Pack rewards for their column: float64."""
    return array(_REWARD, rewards).tobytes()


def _read_pending(database: sqlite3.Connection) -> tuple[Prompt, ...]:
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


def _read_ended(database: sqlite3.Connection) -> dict[str, EndedPrompt]:
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
            tuple(_unpack_rewards(rewards)),
            detail,
        )
        for prompt_id, sequence, body, end, step, rewards, detail in rows
    }


def _unpack_rewards(packed: bytes) -> array[float]:
    rewards: array[float] = array(_REWARD)
    rewards.frombytes(packed)
    return rewards


def _lease(database: sqlite3.Connection) -> OpenLease | None:
    row = database.execute("SELECT batch_id, version, prompt_ids FROM lease").fetchone()
    if row is None:
        return None
    batch_id, version, packed = row
    return OpenLease(batch_id, version, msgspec.msgpack.decode(packed, type=tuple[str, ...]))


class _Positions:
    """Ended positions of one source."""

    def __init__(self, progress: DataProgress) -> None:
        self.low_water, self.above = progress.low_water, set(progress.ended_above)

    def end(self, position: int) -> None:
        if position >= self.low_water:
            self.above.add(position)
        while self.low_water in self.above:
            self.above.discard(self.low_water)
            self.low_water += 1

    def after(self, positions: Iterable[int]) -> DataProgress:
        low_water = self.low_water
        ended_positions = self.above | {position for position in positions if position >= low_water}
        while low_water in ended_positions:
            ended_positions.discard(low_water)
            low_water += 1
        return DataProgress(low_water, tuple(sorted(ended_positions)))


class SourcePositions:
    """Ended positions by source; a run without several sources has one without a name."""

    def __init__(self, progress: DataProgress) -> None:
        self._by_source = {"": _Positions(progress)}
        self._by_source |= {
            name: _Positions(source_progress) for name, source_progress in progress.sources.items()
        }

    def end(self, source: str, position: int) -> list[Statement]:
        """Note that a row ended; return the statements that record it."""
        positions = self._of(source)
        low_water_before = positions.low_water
        positions.end(position)
        if positions.low_water != low_water_before:
            return self._low_water(source, positions.low_water)
        if position > low_water_before:
            return [(_END, (source, position))]
        return []

    def progress(self, also_ended: Iterable[Prompt] = ()) -> DataProgress:
        """Return the ended positions, including those of the prompts `also_ended`."""
        also_positions: dict[str, list[int]] = {}
        for prompt in also_ended:
            if prompt.position is not None:
                self._of(prompt.source)
                also_positions.setdefault(prompt.source, []).append(prompt.position)
        by_source = {
            name: positions.after(also_positions.get(name, ()))
            for name, positions in self._by_source.items()
        }
        run_progress = by_source.pop("")
        return DataProgress(run_progress.low_water, run_progress.ended_above, by_source)

    def rewrite_statements(self) -> Iterator[Statement]:
        """Yield the statements that replace all ended positions in the file."""
        yield from ((_FORGET, ()), (_FORGET_PROGRESS, ()))
        for source, positions in self._by_source.items():
            yield self._low_water(source, positions.low_water)[0]
            for position in sorted(positions.above):
                yield (_END, (source, position))

    def _of(self, source: str) -> _Positions:
        return self._by_source.setdefault(source, _Positions(DataProgress(0)))

    @staticmethod
    def _low_water(source: str, low_water: int) -> list[Statement]:
        """Return the statements that write the low-water mark and delete the positions below it."""
        return [(_LOW_WATER, (source, low_water)), (_BELOW, (source, low_water))]
