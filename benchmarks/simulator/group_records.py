"""Groups as a run recorded them: `groups.jsonl`, one object for each group that ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sluice.algorithm.groups.filter import filter_values
from sluice.errors import DataError
from sluice.types import PromptEnd

GROUPS_NAME = "groups.jsonl"
FILTERED_ENDS = frozenset(
    {PromptEnd.FILTERED_ALL_RIGHT, PromptEnd.FILTERED_ALL_WRONG, PromptEnd.FILTERED_UNIFORM}
)
KEPT_ENDS = frozenset({PromptEnd.TRAINED, PromptEnd.DROPPED_STALE, PromptEnd.DROPPED_SURPLUS})
"""Ends of groups with graded samples: one that grew stale while it ran has none."""


class GroupRecord(msgspec.Struct, frozen=True):
    """How one group ended.

    Args:
        prompt_id: unique in the run.
        key: names the prompt across attempts.
        end: as `PromptEnd` has it.
        right: right samples.
        scored: graded samples.
        tokens: response length of each sample.
        version: announced when it started.
        oldest_version: of its oldest token.
        started_s: when it was admitted, a wait for a replica before its first token included;
            seconds since the start of the reward service that wrote the line, as all times are.
        generated_s: when its last sample ended.
        ended_s: when it was judged, or left the kept ones.
        replicas: who generated it.
        probes: samples requested first; 0: all at once.
        probability: that its prompt was chosen.
        step: that trained it.
        instance: names the start of the service that wrote the line; ``None``: an older file.
        life: place of that start among those in the file, from 0; not of the line.
        is_redone: whether a resumed trainer did it again, in a later line; not of the line.
    """

    prompt_id: str
    key: str
    end: str
    right: int
    scored: int
    tokens: list[int]
    version: int | None = None
    oldest_version: int | None = None
    started_s: float | None = None
    generated_s: float | None = None
    ended_s: float | None = None
    replicas: list[str] = []
    probes: int = 0
    probability: float = 1.0
    step: int | None = None
    instance_id: str | None = None
    life: int = 0
    is_redone: bool = False

    @property
    def is_kept(self) -> bool | None:
        """Whether the filter kept it; ``None``: it failed, and was not judged."""
        if self.end in KEPT_ENDS:
            return True
        return False if self.end in FILTERED_ENDS else None

    @property
    def is_decided_by_grades(self) -> bool:
        """Whether grades decided: kept because they differ, or filtered because they do not."""
        if self.is_kept is None:
            return True
        grades = [number < self.right for number in range(self.scored)]
        return self.is_kept == (filter_values(grades, grades) is None)


def read_groups(file: Path) -> list[GroupRecord]:
    """Read the groups that were generated whole, in order of their end, instance after instance.

    Raises:
        DataError: the file is missing, a line is no such object, or it is of a run whose strategy
            left samples or prompts out: what these would have been is in no line.
    """
    if not file.is_file():
        raise DataError(
            f"{file}: missing; the twin is fitted from the groups that the reward service records"
        )
    found = [record for record in _marked(_decoded(file)) if _is_whole(record)]
    if not found:
        raise DataError(f"{file}: no group was generated whole; let the run train some steps")
    return found


def _decoded(file: Path) -> list[GroupRecord]:
    decoder = msgspec.json.Decoder(GroupRecord)
    found = []
    # What follows the last newline is being written.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{file}, line {number}: no group ({error}); remove the line"
            ) from error
        _check_all_sampled(record, f"{file}, line {number}")
        found.append(record)
    return found


def _is_whole(record: GroupRecord) -> bool:
    return record.scored > 0 and bool(record.tokens) and record.generated_s is not None


def _marked(records: Sequence[GroupRecord]) -> list[GroupRecord]:
    """Return the same lines with their `life` and `is_redone`."""
    lives, redone = _lives(records), _redone(records)
    return [
        msgspec.structs.replace(record, life=life, is_redone=number in redone)
        for number, (record, life) in enumerate(zip(records, lives, strict=True))
    ]


def _lives(records: Sequence[GroupRecord]) -> list[int]:
    """Return the life of each line; without instances a new one begins where `ended_s` falls."""
    lives, life, last = list[int](), 0, None
    for record in records:
        if last is not None:
            is_earlier = (record.ended_s or 0.0) < (last.ended_s or 0.0)
            life += record.instance_id != last.instance_id or (
                record.instance_id is None and is_earlier
            )
        lives.append(life)
        last = record
    return lives


def _redone(records: Sequence[GroupRecord]) -> set[int]:
    """Return the numbers of lines that a later one replaces.

    A trainer that resumes from an earlier checkpoint trains its steps again, and the prompts that
    ended since then are issued again. So the last line of a prompt counts, and a trained group does
    not if a later batch was of its step or of an earlier one.
    """
    redone, seen, lowest = set[int](), set[str](), math.inf
    is_undone, next_batch = False, None
    for number in range(len(records) - 1, -1, -1):
        record = records[number]
        # The groups of a batch end together, so their lines follow each other.
        batch = None if record.step is None else (record.instance_id, record.step)
        if record.step is not None and batch != next_batch:
            is_undone, lowest = record.step >= lowest, min(lowest, record.step)
        if record.prompt_id in seen or (batch is not None and is_undone):
            redone.add(number)
        seen.add(record.prompt_id)
        next_batch = batch
    return redone


def _check_all_sampled(record: GroupRecord, where: str) -> None:
    """Refuse lines with probes or a choice among prompts: their strategy left something out."""
    if record.probes > 0:
        why = (
            f"its group began with {record.probes} samples (probes: {record.probes}), and of those "
            "that ended there the rest is not known"
        )
    elif record.probability < 1.0:
        why = (
            f"its prompt was chosen with probability {record.probability:g}, and prompts that were "
            "skipped have no line"
        )
    else:
        return
    raise DataError(
        f"{where}: {why}; so this run can neither be simulated again nor say what another strategy "
        "would have done. Record a run with sluice.sampling.strategy stream or rounds"
    )
