"""Rules between the sampling strategy, the limits for stragglers, and other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sluice.algorithm.groups.filter import MIN_SAMPLES
from sluice.algorithm.sampling.rules import OnPolicyFill, StrategyName
from sluice.config import derived
from sluice.config.derived import on_policy_fill
from sluice.config.problems import Problem, Severity
from sluice.config.run import RunConfig
from sluice.config.sources import source_configs
from sluice.config.verl_sizes import ROLLOUT

_REWARD_KEY = "sluice.reward"
# A replica reports progress every second interval at most, and one report may be late.
INTERVALS_BEFORE_A_STALL = 4

_SAMPLING_KEY = "sluice.sampling"
_TRUNCATES = "truncates sampling in training: the engine's logprobs are of the tokens that it kept"
_ON_POLICY: Mapping[OnPolicyFill, str] = {
    "exact": (
        f"with sluice.asynchrony.max_staleness = 0 and {_SAMPLING_KEY}.on_policy_fill = exact no "
        "sample is thrown away, but a batch waits for its longest answers several times; where "
        f"answers differ much in length {_SAMPLING_KEY}.on_policy_fill=expected fills it about "
        "twice as fast, and so does a max_staleness of 1"
    ),
    "expected": (
        f"with sluice.asynchrony.max_staleness = 0 and {_SAMPLING_KEY}.on_policy_fill = expected "
        "as many groups run as are expected to fill a batch; when it is full, the others are "
        "sampled again by the next policy"
    ),
}


def longest_interval_ms(config: RunConfig) -> float:
    """Return the longest interval of partial tokens at which a group that makes progress does not
    count as stalled, milliseconds."""
    return 1000 * config.sluice.reward.stall_timeout_s / INTERVALS_BEFORE_A_STALL


def straggler_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield each limit that would end a group that makes progress."""
    reward, interval_ms = config.sluice.reward, config.sluice.reward.partial_interval_ms
    min_s = INTERVALS_BEFORE_A_STALL * interval_ms / 1000
    if reward.stall_timeout_s < min_s:
        yield Problem(
            f"{_REWARD_KEY}.stall_timeout_s",
            reward.stall_timeout_s,
            f"with {_REWARD_KEY}.partial_interval_ms = {interval_ms}: a group that makes progress "
            "would count as stalled",
            f"set stall_timeout_s to at least {min_s:g}, {INTERVALS_BEFORE_A_STALL} intervals",
        )
    longest, budget = derived.max_resp_len(config), reward.group_token_budget
    if budget is not None and budget < longest:
        yield Problem(
            f"{_REWARD_KEY}.group_token_budget",
            budget,
            f"is below the response limit of {longest} tokens: one response could use up its "
            "group's budget",
            "raise it, or set it to null",
        )


def strategy_problems(config: RunConfig) -> list[Problem]:
    """Return the settings that the strategy cannot work with."""
    return [
        problem
        for check in (_filter_problems, _round_problems, _probe_problems)
        for problem in check(config)
    ]


def strategy_notes(config: RunConfig) -> Iterator[Problem]:
    """Yield notes on the strategy's effects; nothing if it does what verl does."""
    sampling = config.sluice.sampling
    name, parts = StrategyName(sampling.strategy), []
    if name is StrategyName.STREAM and _is_filtered_on_policy(config):
        parts = [_ON_POLICY[on_policy_fill(config)]]
    if name is StrategyName.ROUNDS:
        wave = config.data.gen_batch_size or config.data.train_batch_size
        max_batches = config.algorithm.filter_groups.max_num_gen_batches
        bound = (
            f"at most {max_batches} for a batch" if max_batches > 0 else "any number for a batch"
        )
        parts = [
            f"waves of {wave} prompts, {bound}, each awaited whole; kept groups beyond the batch "
            "are thrown away, as in verl"
        ]
    if name.uses_probes:
        sizes = {
            source_config.actor_rollout_ref.rollout.n
            for source_config in source_configs(config).values()
        }
        group = " or ".join(map(str, sorted(sizes)))
        parts.append(
            f"{sampling.probe_samples} of {group} samples are generated first, the others where "
            "they are worth their tokens"
        )
    if name.uses_memory:
        parts.append(
            f"prompts are remembered in {config.sluice.run_dir}/reward/prompt_memory.sqlite, and "
            "skipped where their earlier attempts promise nothing; a skipped prompt counts as "
            "issued in its epoch"
        )
    if parts:
        key, message = f"{_SAMPLING_KEY}.strategy", f": {'; '.join(parts)}"
        yield Problem(key, str(name), message, severity=Severity.NOTE)


def _is_filtered_on_policy(config: RunConfig) -> bool:
    """Return whether it matters how on-policy batches are filled."""
    return config.algorithm.filter_groups.enable and not config.sluice.asynchrony.max_staleness


def _filter_problems(config: RunConfig) -> Iterator[Problem]:
    name = StrategyName(config.sluice.sampling.strategy)
    if name is not StrategyName.STREAM and not config.algorithm.filter_groups.enable:
        yield Problem(
            f"{_SAMPLING_KEY}.strategy",
            str(name),
            "with algorithm.filter_groups.enable = false: without the filter every group is "
            "trained, and there is nothing to choose",
            f"set algorithm.filter_groups.enable=true, or {_SAMPLING_KEY}.strategy=stream",
        )


def _round_problems(config: RunConfig) -> Iterator[Problem]:
    staleness = config.sluice.asynchrony.max_staleness
    if staleness and StrategyName(config.sluice.sampling.strategy) is StrategyName.ROUNDS:
        yield Problem(
            f"{_SAMPLING_KEY}.strategy",
            "rounds",
            f"with sluice.asynchrony.max_staleness = {staleness}: a batch is trained when its "
            "whole wave is finished, so nothing can overlap",
            f"set sluice.asynchrony.max_staleness=0, or {_SAMPLING_KEY}.strategy=stream",
        )


def _probe_problems(config: RunConfig) -> Iterator[Problem]:
    sampling, n = config.sluice.sampling, config.actor_rollout_ref.rollout.n
    key, probes = f"{_SAMPLING_KEY}.probe_samples", sampling.probe_samples
    if not StrategyName(sampling.strategy).uses_probes:
        return
    if probes < MIN_SAMPLES:
        yield Problem(
            key,
            probes,
            ": one sample does not show whether the group is mixed",
            f"set it to {MIN_SAMPLES} or more (4 of 16 is usual)",
        )
    if probes >= n:
        yield Problem(
            key,
            probes,
            f"with {ROLLOUT}.n = {n}: no sample would be left to decide about",
            f"set {key} below {n}, or {_SAMPLING_KEY}.strategy=stream",
        )


def truncation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield each key that truncates training samples, unless the user asked for it."""
    if not config.sluice.sampling.train_truncated:
        for key, value, off in _truncating_keys(config):
            yield Problem(
                key,
                value,
                f"{_TRUNCATES}, the trainer's of all tokens",
                f"set it to {off} (val_kwargs keep their own), or "
                f"{_SAMPLING_KEY}.train_truncated=true to train with the difference",
            )


def truncation_notes(config: RunConfig) -> Iterator[Problem]:
    """Yield each such key that the user asked for."""
    if config.sluice.sampling.train_truncated:
        message = f"{_TRUNCATES}, so ratios and importance weights begin below 1"
        for key, value, _ in _truncating_keys(config):
            yield Problem(key, value, message, severity=Severity.NOTE)


def _truncating_keys(config: RunConfig) -> Iterator[tuple[str, float, int]]:
    """Yield the keys that truncate training samples: key, value, and the value that turns it
    off."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.val_only or config.sluice.rollout.serves_model_files:
        return
    if rollout.top_p < 1.0:
        yield f"{ROLLOUT}.top_p", rollout.top_p, 1
    if rollout.top_k > 0:
        yield f"{ROLLOUT}.top_k", rollout.top_k, -1
