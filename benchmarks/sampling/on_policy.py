"""Compare on-policy batches (S = 0), exact and expected, with waves: medians over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.sampling.overlap import Figures, by_mixture, simulate_stream
from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.result import SimulationResult
from sluice.simulate.settings import IDEAL_TRAINER


def simulate_on_policy(seeds: Sequence[int], steps: int) -> dict[str, Figures]:
    """Return figures by mixture, for ``exact`` and ``expected`` batches of `stream`.

    `fill_speedup_*` is the ratio of the seconds that a batch of ``rounds`` takes to fill to theirs,
    `tokens_ratio_*` theirs of generated tokens to those of ``rounds`` for as many batches,
    `withdrawn_share_expected` the share of all tokens that preempted groups took,
    `long_prompt_ratio_*` the share of long prompts among the trained over that among the issued,
    `hard_share_ratio_expected` the share of hard prompts over that of exact batches.
    """
    return by_mixture(partial(_on_policy, steps), seeds)


def _on_policy(steps: int, run: tuple[str, int]) -> Figures:
    simulated = partial(simulate_stream, run, steps, IDEAL_TRAINER, max_staleness=0)
    waves = simulated(strategy=StrategyName.ROUNDS)
    exact, expected = simulated(), simulated(on_policy_fill="expected")
    found = {"exact": exact, "expected": expected}
    return {
        **{f"fill_speedup_{name}": waves.step_s / one.step_s for name, one in found.items()},
        **{f"tokens_ratio_{name}": _tokens(one) / _tokens(waves) for name, one in found.items()},
        **{f"long_prompt_ratio_{name}": one.long_prompt_ratio for name, one in found.items()},
        "withdrawn_share_expected": expected.accounts["withdrawn"] / _tokens(expected),
        "hard_share_ratio_expected": expected.hard_share / exact.hard_share,
    }


def _tokens(result: SimulationResult) -> float:
    return result.accounts["generated"]
