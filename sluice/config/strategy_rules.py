"""What a sampling strategy needs of the rest of the configuration, and what it means for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sluice.algorithm.group_completeness import LEAST_SAMPLES
from sluice.algorithm.sampling.rules import OnPolicyFill, StrategyName
from sluice.config.derived import on_policy_fill
from sluice.config.run import RunConfig
from sluice.config.verl_run import ROLLOUT

_KEY = "sluice.sampling"
_ON_POLICY: Mapping[OnPolicyFill, str] = {
    "exact": (
        f"with sluice.asynchrony.max_staleness = 0 and {_KEY}.on_policy_fill = exact nothing is "
        "drawn in vain, but a batch waits for its longest answers several times over; where "
        f"answers differ much in length {_KEY}.on_policy_fill=expected fills it about twice as "
        "fast, and so does a max_staleness of 1"
    ),
    "expected": (
        f"with sluice.asynchrony.max_staleness = 0 and {_KEY}.on_policy_fill = expected as many "
        "groups run as are expected to fill a batch; those it is full without are drawn anew by "
        "the next policy"
    ),
}


def strategy_problems(config: RunConfig) -> list[str]:
    """A sentence with the remedy for everything that the strategy cannot work with."""
    return [text for check in (_filter, _rounds, _probes) for text in check(config)]


def strategy_remark(config: RunConfig) -> str | None:
    """What the strategy means for the run, without a full stop; ``None``: nothing unexpected."""
    sampling, n = config.sluice.sampling, config.actor_rollout_ref.rollout.n
    name, parts = StrategyName(sampling.strategy), []
    if name is StrategyName.STREAM and _is_filtered_on_policy(config):
        parts = [_ON_POLICY[on_policy_fill(config)]]
    if name is StrategyName.ROUNDS:
        wave = config.data.gen_batch_size or config.data.train_batch_size
        most = config.algorithm.filter_groups.max_num_gen_batches
        bound = f"at most {most} for a batch" if most > 0 else "any number for a batch"
        parts = [f"waves of {wave} prompts, {bound}, each awaited whole; kept groups beyond the "
                 "batch are thrown away, as in verl"]  # fmt: skip
    if name.uses_probes:
        parts.append(
            f"{sampling.probe_samples} of {n} samples are drawn first, the others where they are "
            "worth their tokens"
        )
    if name.uses_memory:
        parts.append(
            f"prompts are remembered in {config.sluice.run_dir}/reward/prompt_memory.sqlite, and "
            "passed by where their earlier visits promise nothing; a prompt passed by counts as "
            "drawn in its epoch"
        )
    return f"{_KEY}.strategy = {name}: {'; '.join(parts)}" if parts else None


def _is_filtered_on_policy(config: RunConfig) -> bool:
    """Whether it matters how on-policy batches are filled."""
    return config.algorithm.filter_groups.enable and not config.sluice.asynchrony.max_staleness


def _filter(config: RunConfig) -> Iterator[str]:
    name = StrategyName(config.sluice.sampling.strategy)
    if name is not StrategyName.STREAM and not config.algorithm.filter_groups.enable:
        yield (
            f"{_KEY}.strategy = {name} with algorithm.filter_groups.enable = false: without the "
            "filter every group is trained, and there is nothing to choose; set "
            f"algorithm.filter_groups.enable=true, or {_KEY}.strategy=stream"
        )


def _rounds(config: RunConfig) -> Iterator[str]:
    staleness = config.sluice.asynchrony.max_staleness
    if staleness and StrategyName(config.sluice.sampling.strategy) is StrategyName.ROUNDS:
        yield (
            f"{_KEY}.strategy = rounds with sluice.asynchrony.max_staleness = {staleness}: a wave "
            "is awaited whole before its batch is trained, so nothing can overlap; set "
            f"sluice.asynchrony.max_staleness=0, or {_KEY}.strategy=stream"
        )


def _probes(config: RunConfig) -> Iterator[str]:
    sampling, n = config.sluice.sampling, config.actor_rollout_ref.rollout.n
    if not StrategyName(sampling.strategy).uses_probes:
        return
    if sampling.probe_samples < LEAST_SAMPLES:
        yield (
            f"{_KEY}.probe_samples = {sampling.probe_samples}: a lone sample differs from none; "
            f"set it to {LEAST_SAMPLES} or more (4 of 16 is usual)"
        )
    if sampling.probe_samples >= n:
        yield (
            f"{_KEY}.probe_samples = {sampling.probe_samples} with {ROLLOUT}.n = {n}: no sample "
            f"would be left to decide about; set {_KEY}.probe_samples below {n}, or "
            f"{_KEY}.strategy=stream"
        )
