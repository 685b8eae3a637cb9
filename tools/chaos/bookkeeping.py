"""Check that each prompt counts once in the weights that survived, and that none is missing.

The dumps of train batches (`trainer.rollout_data_dir`) show what was trained: a step that is
trained again replaces its dump. The ledger shows what the reward service believes.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Dump:
    """Prompts of a step's batch, and when it was written (seconds since the epoch)."""

    step: int
    written_s: float
    prompt_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class TrainerRestart:
    """A trainer that began with the weights after `step`."""

    at_s: float
    step: int


@dataclass(frozen=True, slots=True)
class LedgerView:
    """`ended` holds clients' prompts that ended: how, and in which step."""

    pending: frozenset[str]
    ended: Mapping[str, tuple[str, int | None]]


@dataclass(frozen=True, slots=True)
class AccountingVerdict:
    """Ids at fault, each with what is wrong. `unseen_steps` left no dump that counts."""

    lost: Mapping[str, str]
    doubled: Mapping[str, str]
    unseen_steps: int


def surviving_steps(
    dumps: Iterable[Dump], restarts: Sequence[TrainerRestart], last_step: int
) -> dict[int, frozenset[str]]:
    """Return prompts by step, of batches that are in the final weights.

    A batch is not, if the trainer began again before its step after the dump was written.
    """
    return {
        dump.step: dump.prompt_ids
        for dump in dumps
        if dump.step <= last_step
        and not any(r.at_s > dump.written_s and r.step < dump.step for r in restarts)
    }


def judge_accounting(
    surviving: Mapping[int, Collection[str]],
    ledger: LedgerView,
    accepted: Collection[str],
    last_step: int,
) -> AccountingVerdict:
    """Return the prompts that are lost or doubled.

    Args:
        surviving: prompts by step, as `surviving_steps` gives them.
        ledger: after the end.
        accepted: prompts that a client holds a receipt of.
        last_step: of the run.
    """
    lost, doubled = _lost(surviving, ledger, accepted, last_step), {}
    steps_of: dict[str, list[int]] = {}
    for step, prompt_ids in sorted(surviving.items()):
        for prompt_id in prompt_ids:
            steps_of.setdefault(prompt_id, []).append(step)
    for prompt_id, steps in steps_of.items():
        if len(steps) > 1:
            doubled[prompt_id] = f"trained in steps {steps}"
        elif prompt_id in ledger.pending:
            doubled[prompt_id] = f"trained in step {steps[0]}, and pending"
    return AccountingVerdict(lost, doubled, last_step - len(surviving))


def _lost(
    surviving: Mapping[int, Collection[str]],
    ledger: LedgerView,
    accepted: Collection[str],
    last_step: int,
) -> dict[str, str]:
    lost = {
        prompt_id: "accepted, and neither ended nor pending"
        for prompt_id in accepted
        if prompt_id not in ledger.ended and prompt_id not in ledger.pending
    }
    for prompt_id, (end, step) in ledger.ended.items():
        if end != TRAINED or step is None:
            continue
        if step > last_step or prompt_id not in surviving.get(step, (prompt_id,)):
            lost[prompt_id] = f"said to be trained in step {step}, whose weights did not survive"
    return lost


def ended_as(ledger: LedgerView) -> Counter[str]:
    """Clients' prompts by end."""
    return Counter(end for end, _ in ledger.ended.values())


def read_dumps(folder: Path) -> list[Dump]:
    """Read all whole dumps."""
    found = []
    for file in folder.glob("[0-9]*.jsonl"):
        # Not splitlines: answers hold other characters that end lines.
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line]
        ids = frozenset(row["uid"] for row in rows)
        found.append(Dump(int(file.stem), file.stat().st_mtime, ids))
    return found


def read_ledger(file: Path) -> LedgerView:
    """Read the ledger of a reward service that has ended."""
    with closing(sqlite3.connect(file)) as database:
        pending = database.execute("SELECT prompt_id FROM pending").fetchall()
        ended = database.execute("SELECT prompt_id, prompt_end, step FROM ended").fetchall()
    return LedgerView(
        frozenset(prompt_id for (prompt_id,) in pending),
        {prompt_id: (end, step) for prompt_id, end, step in ended},
    )
