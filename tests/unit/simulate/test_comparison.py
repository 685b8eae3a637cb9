"""Comparisons are on equal terms."""

from __future__ import annotations

from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.result import compare
from tests.unit.simulate.simulations import SmallWorkload, small


def test_all_strategies_are_compared_and_rounds_is_synchronous() -> None:
    steps: list[int] = []
    compared = compare(small(max_staleness=2), SmallWorkload, on_step=steps.append)
    by_name = {StrategyName(one.result.strategy): one for one in compared}
    assert list(by_name) == list(StrategyName)
    assert len(steps) == 2 * len(StrategyName) * 12
    assert by_name[StrategyName.ROUNDS].result.staleness_max == 0
    assert by_name[StrategyName.ROUNDS].gen_ratio == 1.0
    assert by_name[StrategyName.ROUNDS].fill_speedup == 1.0
    assert by_name[StrategyName.STREAM].hard_share_ratio == 1.0
    assert by_name[StrategyName.STREAM].fill_speedup > 1.0
    assert by_name[StrategyName.STREAM].result.num_kept_discarded == 0
