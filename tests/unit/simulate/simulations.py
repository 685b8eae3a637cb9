"""Small simulations for tests."""

from __future__ import annotations

import numpy as np

from sluice.algorithm.sampling.rules import OnPolicyFill, SamplingRules, StrategyName
from sluice.simulate.settings import FleetSettings, SimulationSettings, TrainerSettings
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples

FLEET = FleetSettings(num_replicas=2, slots=16, base_step_s=0.01, per_sequence_s=0.0005)
TRAINER = TrainerSettings(train_s=2.0, publish_s=0.5, stall_s=0.2)


class SmallWorkload:
    """Half of the prompts are mixed mostly, a quarter each too hard and too easy; short answers."""

    def __init__(self, seed: int = 0, num_prompts: int = 64) -> None:
        self._seed, self._num_prompts = seed, num_prompts

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        number = position % self._num_prompts
        rate = (0.0, 0.5, 1.0, 0.4)[number % 4]
        return SimulatedPrompt(str(number), rate, number % 5 == 1, number)

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        draws = np.random.default_rng([self._seed, position, num_restarts])
        scale = 400 if prompt.is_long else 60
        tokens = 1 + draws.poisson(scale * draws.random(num_samples))
        are_right = draws.random(num_samples) < prompt.pass_rate
        return SimulatedSamples(tokens.tolist(), are_right.tolist())


def small(
    strategy: StrategyName = StrategyName.STREAM,
    *,
    batch_size: int = 6,
    max_staleness: int = 1,
    group_size: int = 4,
    num_steps: int = 12,
    on_policy_fill: OnPolicyFill = "exact",
    **others: object,
) -> SimulationSettings:
    bound = 0 if strategy is StrategyName.ROUNDS else max_staleness
    rules = SamplingRules(
        strategy,
        batch_size,
        bound,
        group_size,
        batch_size,
        probe_samples=min(2, group_size - 1),
        on_policy_fill=on_policy_fill,
    )
    settings = {"fleet": FLEET, "trainer": TRAINER, "num_steps": num_steps} | others
    return SimulationSettings(rules, **settings)
