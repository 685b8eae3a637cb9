"""What is left of a run under chaos: prompts, digests, waits, throughput.

The dumps of train batches (`trainer.rollout_data_dir`) show what was trained: a step that is
trained again replaces its dump. The ledger of a reward service that was killed shows the batch that
got none. The last ledger and the group log show the reward service's own view.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from sluice.config.deadlines import generate_timeout_s, replica_wait_timeout_s
from sluice.config.run import RunConfig

TRAINED = "trained"
# A look takes a second, a busy machine some more.
_GRACE_S = 10.0
_BUCKETS = 3  # of a small model: one of weights, two that frame them
_FULL_SHARE = 0.95


ROW = "data-"
"""What the ids of data-set rows begin with; the position follows."""


@dataclass(frozen=True, slots=True)
class Dump:
    """A step's batch: its samples by prompt (0: not known), and when it was written (seconds since
    the epoch)."""

    step: int
    written_s: float
    samples: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TrainerRestart:
    """A trainer that began with the weights after `step`, at so many seconds since the epoch."""

    at_s: float
    step: int


@dataclass(frozen=True, slots=True)
class LedgerView:
    """What the ledger holds.

    Attributes:
        pending: ids.
        ended: clients' prompts that ended: how, and in which step.
        low_water: positions of the data set below it have ended.
        ended_above: those above that have.
    """

    pending: frozenset[str]
    ended: Mapping[str, tuple[str, int | None]]
    low_water: int = 0
    ended_above: frozenset[int] = frozenset()

    def has_ended(self, row: str) -> bool:
        """Return whether a row of the data set has ended."""
        position = int(row.removeprefix(ROW))
        return position < self.low_water or position in self.ended_above


def read_dumps(folder: Path) -> list[Dump]:
    """Read all whole dumps."""
    found = []
    for file in folder.glob("[0-9]*.jsonl"):
        # Not splitlines: answers hold other characters that end lines.
        rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
        samples = Counter(row["uid"] for row in rows)
        found.append(Dump(int(file.stem), file.stat().st_mtime, samples))
    return found


def read_leases(folder: Path) -> list[Dump]:
    """Read the batches at the trainer in ledgers of killed reward services, in order of time.

    A copy into which the next service wrote meanwhile shows nothing.

    Args:
        folder: of copies: ``<seconds since the epoch>/ledger.sqlite``.
    """
    found = []
    for file in folder.glob("*/ledger.sqlite"):
        with closing(sqlite3.connect(file)) as database, suppress(sqlite3.DatabaseError):
            for version, packed in database.execute("SELECT version, prompt_ids FROM lease"):
                ids = msgspec.msgpack.decode(packed, type=list[str])
                found.append(Dump(version + 1, float(file.parent.name), dict.fromkeys(ids, 0)))
    return sorted(found, key=lambda one: one.written_s)


def read_ledger(file: Path) -> LedgerView:
    """Read the ledger of a reward service that has ended."""
    with closing(sqlite3.connect(file)) as database:
        pending = database.execute("SELECT prompt_id FROM pending").fetchall()
        ended = database.execute("SELECT prompt_id, prompt_end, step FROM ended").fetchall()
        progress = "SELECT coalesce(max(low_water), 0) FROM source_progress WHERE source = ''"
        (low_water,) = database.execute(progress).fetchone()
        above = database.execute("SELECT position FROM ended_positions").fetchall()
    return LedgerView(
        frozenset(prompt_id for (prompt_id,) in pending),
        {prompt_id: (how, step) for prompt_id, how, step in ended},
        low_water,
        frozenset(position for (position,) in above),
    )


def surviving_steps(
    dumps: Iterable[Dump], restarts: Sequence[TrainerRestart], last_step: int
) -> dict[int, Mapping[str, int]]:
    """Return samples by prompt by step, of batches that are in the final weights.

    A batch is not if the trainer began again before its step after the dump was written. Of two
    batches of a step the later one in `dumps` counts.
    """
    return {
        dump.step: dump.samples
        for dump in dumps
        if dump.step <= last_step
        and not any(r.at_s > dump.written_s and r.step < dump.step for r in restarts)
    }


def returned_rows(
    batches: Iterable[Dump],
    surviving: Mapping[int, Mapping[str, int]],
    lines: Iterable[Mapping[str, Any]],
    restarts: Sequence[TrainerRestart],
) -> set[str]:
    """Return rows that a restarted trainer may have returned to the data set: those of batches that
    died with it, and those that were filtered. They are issued again after all that are pending.
    """
    if not restarts:
        return set()
    filtered = {line["prompt_id"] for line in lines if line["end"] != TRAINED}
    died = [batch.samples for batch in batches if surviving.get(batch.step) is not batch.samples]
    return filtered.union(*died)


def lost_prompts(
    surviving: Mapping[int, Collection[str]],
    ledger: LedgerView,
    accepted: Collection[str],
    last_step: int,
    lines: Iterable[Mapping[str, Any]] = (),
    returned: Collection[str] = (),
) -> dict[str, str]:
    """Return the ids of lost prompts, each with what is wrong.

    Args:
        surviving: prompts by step, as `surviving_steps` gives them.
        ledger: after the end.
        accepted: prompts that a client holds a receipt of.
        last_step: of the run.
        lines: of the group log.
        returned: rows that a restarted trainer returned to the data set: `returned_rows`.
    """
    lost = {
        prompt_id: "accepted, and neither ended nor pending"
        for prompt_id in accepted
        if prompt_id not in ledger.ended and prompt_id not in ledger.pending
    }
    for name in _skipped_rows(ledger, returned):
        lost[name] = "neither ended nor pending, and a later row is pending"
    clients = [(name, step) for name, (how, step) in ledger.ended.items() if how == TRAINED]
    for prompt_id, step in (*clients, *_trained_rows(surviving, ledger, lines)):
        # A step without a batch accuses no prompt.
        if step and (step > last_step or prompt_id not in surviving.get(step, (prompt_id,))):
            lost[prompt_id] = f"recorded as trained in step {step}, whose weights did not survive"
    return lost


def _skipped_rows(ledger: LedgerView, returned: Collection[str]) -> list[str]:
    """Return rows that nothing holds before one that is pending: rows are issued in order, but for
    those that were `returned` to the data set."""
    pending = [int(one.removeprefix(ROW)) for one in ledger.pending if one.startswith(ROW)]
    rows = (f"{ROW}{at}" for at in range(ledger.low_water, max(pending, default=0)))
    held = {*ledger.pending, *returned}
    return [row for row in rows if not ledger.has_ended(row) and row not in held]


def _trained_rows(
    surviving: Mapping[int, Collection[str]],
    ledger: LedgerView,
    lines: Iterable[Mapping[str, Any]],
) -> list[tuple[str, int | None]]:
    """Return the last step of ended rows that no surviving batch holds and whose last end is that
    they were trained. The ledger does not know it, and forgets a row's end with the trainer.

    A killed reward service may leave out a later line of a row that a batch holds.
    """
    last = {line["prompt_id"]: line for line in lines}
    held = set().union(*surviving.values())
    return [
        (name, line["step"])
        for name, line in last.items()
        if line["end"] == TRAINED
        and name.startswith(ROW)
        and name not in held
        and ledger.has_ended(name)
    ]


def doubled_prompts(surviving: Mapping[int, Collection[str]], ledger: LedgerView) -> dict[str, str]:
    """Return the ids of prompts that count twice, each with what is wrong."""
    steps_of: dict[str, list[int]] = {}
    for step, prompt_ids in sorted(surviving.items()):
        for prompt_id in prompt_ids:
            steps_of.setdefault(prompt_id, []).append(step)
    doubled = {}
    for prompt_id, steps in steps_of.items():
        if len(steps) > 1:
            doubled[prompt_id] = f"trained in steps {steps}"
        elif prompt_id in ledger.pending:
            doubled[prompt_id] = f"trained in step {steps[0]}, and pending"
    return doubled


@dataclass(frozen=True, slots=True)
class ObservedWait:
    """A wait as a service reported it at `at_s`."""

    at_s: float
    service: str
    peer: str
    phase: str
    seconds: float


def late_waits(
    seen: Iterable[ObservedWait],
    config: RunConfig,
    stopped: Sequence[tuple[str, float, float]],
) -> list[str]:
    """Return one text for each wait that exceeded the deadline of its phase.

    Args:
        seen: all looks.
        config: has the deadlines; a phase without one has to end with the longest of them.
        stopped: service, from, to (the clock of `seen`): a stopped process sees no deadline.
    """
    service = config.sluice
    reward, weights, trainer = service.reward, service.weights, service.trainer
    longest_s = max(
        trainer.batch_timeout_s, replica_wait_timeout_s(config), generate_timeout_s(config)
    )
    limits_s = {
        "generating": reward.stall_timeout_s,
        "joining epoch": weights.timeout_s,
        "staging version": _BUCKETS * weights.timeout_s,
        "committing version": 2 * weights.timeout_s,
        "aborting epoch": weights.timeout_s,
        "answering a probe": weights.probe_timeout_s,
        "leaving a failed epoch": weights.timeout_s,
        "sending a heartbeat": 3.0,
        "registering a replica": 16.0,
        "committing changes": 60.0,
        # Of programs that work on samples; one that is offered waits for as long as none is free.
        "leasing a sample": math.inf,
        "taking samples": math.inf,
        "working on samples": math.inf,
        "asking for an answer": service.environment.episode_timeout_s,
        "ending its sample": service.environment.episode_timeout_s,
    }
    worst: dict[tuple[str, str, str, int], tuple[float, str]] = {}
    for wait in seen:
        began_s = wait.at_s - wait.seconds
        own = [(a, b) for name, a, b in stopped if name == wait.service]
        asleep_s = sum(max(0.0, min(b, wait.at_s) - max(a, began_s)) for a, b in own)
        allowed_s = limits_s.get(wait.phase.rstrip("0123456789 "), longest_s)
        if wait.seconds - asleep_s > allowed_s + _GRACE_S:
            # Looks at one wait agree about its beginning to a second or two, and its phase may
            # hold counts.
            phase = re.sub(r"\d+", "", wait.phase)
            key = (wait.service, wait.peer, phase, round(began_s / 5))
            text = f"{wait.service} for {wait.peer} ({wait.phase}) {wait.seconds:.0f} s of "
            worst[key] = max(worst.get(key, (0.0, "")), (wait.seconds, f"{text}{allowed_s:.0f}"))
    return [text for _, text in worst.values()]


@dataclass(frozen=True, slots=True)
class Yield:
    """A group that ended: when it was seen, its response tokens, and the replicas it was on."""

    at_s: float
    tokens: float
    replicas: tuple[str, ...] = ()


def tokens_per_s(yields: Sequence[Yield], from_s: float, to_s: float) -> float:
    """Return tokens a second of what ended in ``[from_s, to_s)``; `yields` in order of time."""
    begin, end = (bisect_left(yields, one, key=lambda each: each.at_s) for one in (from_s, to_s))
    within = yields[begin:end]
    return math.fsum(each.tokens for each in within) / (to_s - from_s)


def recovered_s(
    yields: Sequence[Yield], from_s: float, *, full_rate: float, window_s: float, end_s: float
) -> float | None:
    """Return when the first window since `from_s` with 95 % of `full_rate` begins.

    It includes faults that happen meanwhile, so it is an upper bound. None: no such window before
    `end_s`, or nothing to compare with.
    """
    if full_rate <= 0:
        return None
    first = bisect_left(yields, from_s, key=lambda each: each.at_s)
    for start_s in (from_s, *(each.at_s for each in yields[first:])):
        if start_s + window_s > end_s:
            return None
        if tokens_per_s(yields, start_s, start_s + window_s) >= _FULL_SHARE * full_rate:
            return start_s
    return None


def longest_pause_s(steps_s: Sequence[float], from_s: float, end_s: float) -> float:
    """Return the longest time without the end of a step."""
    inside = [at_s for at_s in steps_s if from_s < at_s < end_s]
    return max(later - earlier for earlier, later in pairwise([from_s, *inside, end_s]))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None without values."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 1)
