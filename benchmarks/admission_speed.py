"""Admissions decided per second, as the reward service decides them."""

from __future__ import annotations

import time

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy

_BATCH, _STALENESS, _GROUP = 4096, 3, 16
_REPEATS = 20_000


def admissions_per_second(num_in_flight: int) -> float:
    """Decides one group at a time with so many under way: how many to start, and the visit."""
    rules = SamplingRules(StrategyName.STREAM, _BATCH, _STALENESS, _GROUP)
    strategy = SamplingStrategy(rules)
    for sequence in range(200):
        visit = strategy.visit(str(sequence), sequence, None, 0)
        strategy.ended(
            visit,
            num_right=1,
            num_scored=_GROUP,
            mean_tokens=1.0,
            kept=sequence % 2 == 0,
            version=0,
        )
    load = LoopLoad(num_in_flight, num_kept=100, num_in_training=0, room=64)
    began_s = time.perf_counter()
    for sequence in range(_REPEATS):
        if strategy.num_to_start(load) > 0:
            strategy.started(strategy.visit("prompt", sequence, None, 0))
    return _REPEATS / (time.perf_counter() - began_s)
