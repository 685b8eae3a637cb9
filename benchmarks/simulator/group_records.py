"""Groups as a run recorded them: `groups.jsonl`, one object for each group that ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from services.reward.records.group_log import GroupLine
from sluice.algorithm.groups.filter import filter_values
from sluice.errors import DataError
from sluice.types import PromptEnd

GROUPS_NAME = "groups.jsonl"
FILTERED_ENDS = frozenset(
    {PromptEnd.FILTERED_ALL_RIGHT, PromptEnd.FILTERED_ALL_WRONG, PromptEnd.FILTERED_UNIFORM}
)
KEPT_ENDS = frozenset({PromptEnd.TRAINED, PromptEnd.DROPPED_STALE, PromptEnd.DROPPED_SURPLUS})
"""Ends of groups with graded samples: one that grew stale while it ran has none."""


class GroupRecord(GroupLine, frozen=True, kw_only=True):
    """How one group ended, as the reward service wrote it."""

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
    """Read the groups that were generated whole, in the order of their end.

    Raises:
        DataError: the file is missing, a line is no such object, the run was restarted, or its
            strategy left samples or prompts out: no line shows what these would have been.
    """
    if not file.is_file():
        raise DataError(
            f"{file}: missing; the twin is fitted from the groups that the reward service records"
        )
    decoder, found = msgspec.json.Decoder(GroupRecord), list[GroupRecord]()
    # What follows the last newline is being written.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        where = f"{file}, line {number}"
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DataError(f"{where}: no group ({error}); remove the line") from error
        _check_all_sampled(record, where)
        found.append(record)
    _check_not_restarted(found, file)
    whole = [one for one in found if one.scored and one.tokens and one.generated_s is not None]
    if not whole:
        raise DataError(f"{file}: no group was generated whole; let the run train some steps")
    return whole


def _check_not_restarted(records: Sequence[GroupRecord], file: Path) -> None:
    """Refuse records of two services, whose clocks differ, and of steps that were done again."""
    steps = [record.step for record in records if record.step is not None]
    is_redone = any(later < earlier for earlier, later in pairwise(steps))
    if len({record.instance_id for record in records}) > 1 or is_redone:
        raise DataError(
            f"{file}: its reward service was started again, or its trainer repeated steps; so the "
            "record does not show which groups ran at the same time. Record a run without a restart"
        )


def _check_all_sampled(record: GroupRecord, where: str) -> None:
    """Refuse lines with probes or a choice among prompts: their strategy left something out."""
    if record.probes > 0 or record.probability < 1.0:
        raise DataError(
            f"{where}: its strategy left samples or prompts out (probes: {record.probes}, "
            f"probability: {record.probability:g}), and no line shows what these would have been. "
            "Record a run with sluice.sampling.strategy stream or rounds"
        )
