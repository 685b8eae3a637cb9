"""How old trained groups were: counts over the whole run, from `groups.jsonl` as it grows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from sluice.dashboard.line_tail import UNREADABLE, LineTail

__all__ = ["StalenessCounts"]

_GROUPS_NAME = "groups.jsonl"
_TRAINED = "trained"
MOST_BARS = 64


class _Ended(msgspec.Struct):
    end: str
    step: int | None = None
    oldest_version: int | None = None


_decode = msgspec.json.Decoder(_Ended).decode


class StalenessCounts:
    """Trained groups by staleness: the version that was updated minus the oldest that drew a token.

    The step that trains a group updates version ``step - 1``. Lines without a step, as of groups
    that an earlier service trained, are not counted.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / _GROUPS_NAME)
        self._counts: Counter[int] = Counter()
        self._num_undecoded = 0

    @property
    def num_unread(self) -> int:
        """Lines that are no ended groups, or too long."""
        return self._num_undecoded + self._tail.num_left_out

    def read(self) -> bool:
        """Takes in a bounded number of lines; whether there may be more at once.

        Raises:
            OSError: the file cannot be read.
        """
        taken = self._tail.take()
        if taken.is_reset:
            self._counts.clear()
            self._num_undecoded = 0
        for line in taken.lines:
            try:
                group = _decode(line.text)
            except UNREADABLE:
                self._num_undecoded += bool(line.text.strip())
                continue
            if (
                group.end == _TRAINED
                and group.step is not None
                and group.oldest_version is not None
            ):
                # An age beyond the last bar goes into it, which bounds the memory.
                age = max(group.step - 1 - group.oldest_version, 0)
                self._counts[min(age, MOST_BARS - 1)] += 1
        return taken.has_more

    def bars(self) -> dict[str, list[int]]:
        """``versions`` (each from 0 to the oldest) and ``groups`` (how many)."""
        versions = list(range(max(self._counts, default=-1) + 1))
        return {"versions": versions, "groups": [self._counts[version] for version in versions]}
