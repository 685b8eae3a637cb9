"""Groups whose first samples differ take a place as kept ones do, in the simulator as well."""

from __future__ import annotations

import pytest

from sluice.algorithm.sampling.rules import StrategyName
from sluice.algorithm.sampling.strategy import LoopLoad
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.loop import SimulatedLoop
from sluice.simulate.recorder import SimulationRecorder, TokenCause
from sluice.simulate.settings import SimulationSettings
from tests.unit.simulate.simulations import SmallWorkload, small


class WatchedLoop(SimulatedLoop):
    """Notes which groups are sure whenever the load is reported."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.filtered: set[str] = set()
        self.sure: set[str] = set()
        self.num_sure: list[int] = []
        super().__init__(settings, SmallWorkload(), SimulationRecorder(on_end=self._note_end))

    def _load(self, capacity: int) -> LoopLoad:
        load = super()._load(capacity)
        sure = [group for group in self._in_flight.values() if group.position in self._sure]
        assert load.num_sure == len(sure)  # none that has ended or was broken off
        self.num_sure.append(load.num_sure)
        self.sure |= {f"{group.name}/{group.num_restarts}" for group in sure}
        return load

    def _note_end(self, group: SimulatedGroup, cause: TokenCause, _now: float) -> None:
        if cause in (TokenCause.ALL_RIGHT, TokenCause.ALL_WRONG):
            self.filtered.add(f"{group.name}/{group.num_restarts}")


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_a_sure_group_is_in_flight_and_never_filtered(on_stale: str) -> None:
    loop = WatchedLoop(small(StrategyName.STAGED, on_stale=on_stale))
    loop.run()
    assert max(loop.num_sure) > 0
    assert loop.filtered
    assert not loop.sure & loop.filtered


def test_without_probes_no_group_is_sure_before_it_ends() -> None:
    loop = WatchedLoop(small(StrategyName.STREAM))
    loop.run()
    assert set(loop.num_sure) == {0}
