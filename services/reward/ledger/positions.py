"""Which rows of the data set ended, of each source, and the statements that write that down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.reward.ledger.writer import Statement
from sluice.types import DataProgress

_END = "INSERT OR IGNORE INTO ended_positions VALUES (?)"
_FORGET = "DELETE FROM ended_positions"
_LOW_WATER = "UPDATE ledger SET low_water = ?"
_BELOW = "DELETE FROM ended_positions WHERE position < ?"
_END_OF = "INSERT OR IGNORE INTO ended_source_positions VALUES (?, ?)"
_FORGET_ALL_OF = "DELETE FROM ended_source_positions"
_FORGET_PROGRESS = "DELETE FROM source_progress"
_LOW_WATER_OF = "INSERT OR REPLACE INTO source_progress VALUES (?, ?)"
_BELOW_OF = "DELETE FROM ended_source_positions WHERE source = ? AND position < ?"


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
        ended, low_water = self.above.union(positions), self.low_water
        while low_water in ended:
            ended.discard(low_water)
            low_water += 1
        return DataProgress(low_water, tuple(sorted(ended)))


class SourcePositions:
    """Ended positions by source; a run without several sources has one without a name.

    Args:
        progress: what has ended so far.
    """

    def __init__(self, progress: DataProgress) -> None:
        self._by_source = {"": _Positions(progress)}
        self._by_source |= {name: _Positions(one) for name, one in progress.sources.items()}

    def end(self, source: str, position: int) -> list[Statement]:
        """Note that a row ended; return what writes it."""
        found = self._of(source)
        before = found.low_water
        found.end(position)
        if found.low_water != before:
            return self._low_water(source, found.low_water)
        if position > before:
            return [(_END_OF, (source, position)) if source else (_END, (position,))]
        return []

    def progress(self, also_ended: Iterable[tuple[str, int]] = ()) -> DataProgress:
        """Return what ended, `also_ended` (source, position) included."""
        also: dict[str, list[int]] = {}
        for source, position in also_ended:
            self._of(source)
            also.setdefault(source, []).append(position)
        found = {name: one.after(also.get(name, ())) for name, one in self._by_source.items()}
        own = found.pop("")
        return DataProgress(own.low_water, own.ended_above, found)

    def rewritten(self) -> Iterator[Statement]:
        """Yield what replaces all that was written before."""
        yield from ((_FORGET, ()), (_FORGET_ALL_OF, ()), (_FORGET_PROGRESS, ()))
        for source, found in self._by_source.items():
            yield self._low_water(source, found.low_water)[0]
            for position in sorted(found.above):
                yield (_END_OF, (source, position)) if source else (_END, (position,))

    def _of(self, source: str) -> _Positions:
        return self._by_source.setdefault(source, _Positions(DataProgress(0)))

    @staticmethod
    def _low_water(source: str, low_water: int) -> list[Statement]:
        """Return what writes it, and then what forgets the positions below."""
        if source:
            return [(_LOW_WATER_OF, (source, low_water)), (_BELOW_OF, (source, low_water))]
        return [(_LOW_WATER, (low_water,)), (_BELOW, (low_water,))]
