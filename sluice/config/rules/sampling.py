"""What a sampling strategy and the limits for stragglers need of the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sluice.algorithm.groups.filter import LEAST_SAMPLES
from sluice.algorithm.sampling.rules import OnPolicyFill, StrategyName
from sluice.config import derived
from sluice.config.derived import on_policy_fill
from sluice.config.run import RunConfig
from sluice.config.verl_run import ROLLOUT

_REWARD_KEY = "sluice.reward"
# Signs of life come every second interval at most, and one of them may be late.
INTERVALS_BEFORE_A_STALL = 4


def straggler_problems(config: RunConfig) -> Iterator[str]:
    """A sentence with the remedy for each limit that would end what is well."""
    reward, interval_s = config.sluice.reward, config.sluice.reward.partial_interval_ms / 1000
    least_s = INTERVALS_BEFORE_A_STALL * interval_s
    if reward.stall_timeout_s < least_s:
        yield (
            f"{_REWARD_KEY}.stall_timeout_s = {reward.stall_timeout_s:g} with "
            f"{_REWARD_KEY}.partial_interval_ms "
            f"= {reward.partial_interval_ms}: a group that gets on would count as stalled; set "
            f"stall_timeout_s to at least {least_s:g}, {INTERVALS_BEFORE_A_STALL} intervals"
        )
    longest, budget = derived.max_resp_len(config), reward.group_token_budget
    if budget is not None and budget < longest:
        yield (
            f"{_REWARD_KEY}.group_token_budget = {budget} is below the response limit of {longest} "
            "tokens: one response could use up its group's; raise it, or set it to null"
        )


_SAMPLING_KEY = "sluice.sampling"
_ON_POLICY: Mapping[OnPolicyFill, str] = {
    "exact": (
        f"with sluice.asynchrony.max_staleness = 0 and {_SAMPLING_KEY}.on_policy_fill = exact "
        "nothing is "
        "drawn in vain, but a batch waits for its longest answers several times over; where "
        f"answers differ much in length {_SAMPLING_KEY}.on_policy_fill=expected fills it about "
        "twice as "
        "fast, and so does a max_staleness of 1"
    ),
    "expected": (
        f"with sluice.asynchrony.max_staleness = 0 and {_SAMPLING_KEY}.on_policy_fill = "
        "expected as many "
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
    return f"{_SAMPLING_KEY}.strategy = {name}: {'; '.join(parts)}" if parts else None


def _is_filtered_on_policy(config: RunConfig) -> bool:
    """Whether it matters how on-policy batches are filled."""
    return config.algorithm.filter_groups.enable and not config.sluice.asynchrony.max_staleness


def _filter(config: RunConfig) -> Iterator[str]:
    name = StrategyName(config.sluice.sampling.strategy)
    if name is not StrategyName.STREAM and not config.algorithm.filter_groups.enable:
        yield (
            f"{_SAMPLING_KEY}.strategy = {name} with algorithm.filter_groups.enable = false: "
            "without the "
            "filter every group is trained, and there is nothing to choose; set "
            f"algorithm.filter_groups.enable=true, or {_SAMPLING_KEY}.strategy=stream"
        )


def _rounds(config: RunConfig) -> Iterator[str]:
    staleness = config.sluice.asynchrony.max_staleness
    if staleness and StrategyName(config.sluice.sampling.strategy) is StrategyName.ROUNDS:
        yield (
            f"{_SAMPLING_KEY}.strategy = rounds with sluice.asynchrony.max_staleness = "
            f"{staleness}: a wave "
            "is awaited whole before its batch is trained, so nothing can overlap; set "
            f"sluice.asynchrony.max_staleness=0, or {_SAMPLING_KEY}.strategy=stream"
        )


def _probes(config: RunConfig) -> Iterator[str]:
    sampling, n = config.sluice.sampling, config.actor_rollout_ref.rollout.n
    if not StrategyName(sampling.strategy).uses_probes:
        return
    if sampling.probe_samples < LEAST_SAMPLES:
        yield (
            f"{_SAMPLING_KEY}.probe_samples = {sampling.probe_samples}: a lone sample differs "
            "from none; "
            f"set it to {LEAST_SAMPLES} or more (4 of 16 is usual)"
        )
    if sampling.probe_samples >= n:
        yield (
            f"{_SAMPLING_KEY}.probe_samples = {sampling.probe_samples} with {ROLLOUT}.n = {n}: "
            "no sample "
            f"would be left to decide about; set {_SAMPLING_KEY}.probe_samples below {n}, or "
            f"{_SAMPLING_KEY}.strategy=stream"
        )
