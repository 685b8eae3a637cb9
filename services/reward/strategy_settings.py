"""The sampling strategy as configured."""

from __future__ import annotations

from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.config.derived import on_policy_fill
from sluice.config.run import RunConfig


def sampling_rules(config: RunConfig) -> SamplingRules:
    """The rules of the run's strategy."""
    sampling, batch_size = config.sluice.sampling, config.data.train_batch_size
    return SamplingRules(
        StrategyName(sampling.strategy),
        train_batch_size=batch_size,
        max_staleness=config.sluice.asynchrony.max_staleness,
        samples_per_group=config.actor_rollout_ref.rollout.n,
        gen_batch_size=config.data.gen_batch_size or batch_size,
        max_num_gen_batches=config.algorithm.filter_groups.max_num_gen_batches,
        probe_samples=sampling.probe_samples,
        exploration=sampling.exploration,
        coverage_guard=sampling.coverage_guard,
        seed=abs(config.data.seed or 0),
        paces=config.sluice.asynchrony.pace,
        ahead_share=config.sluice.asynchrony.ahead_share,
        on_policy_fill=on_policy_fill(config),
    )


def round_size(rules: SamplingRules) -> int:
    """Groups that count as one round of generation: a wave, or a train batch without waves."""
    has_waves = rules.strategy is StrategyName.ROUNDS
    return rules.gen_batch_size if has_waves else rules.train_batch_size
