"""What a sampling strategy, and the limits for stragglers, need from other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sluice.algorithm.groups.filter import LEAST_SAMPLES
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
    least_s = INTERVALS_BEFORE_A_STALL * interval_ms / 1000
    if reward.stall_timeout_s < least_s:
        yield Problem(
            f"{_REWARD_KEY}.stall_timeout_s",
            reward.stall_timeout_s,
            f"with {_REWARD_KEY}.partial_interval_ms = {interval_ms}: a group that makes progress "
            "would count as stalled",
            f"set stall_timeout_s to at least {least_s:g}, {INTERVALS_BEFORE_A_STALL} intervals",
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
    """Return everything that the strategy cannot work with."""
    return [problem for check in (_filter, _rounds, _probes) for problem in check(config)]


def strategy_notes(config: RunConfig) -> Iterator[Problem]:
    """Yield what the strategy means for the run; nothing where it does what verl does."""
    sampling = config.sluice.sampling
    name, parts = StrategyName(sampling.strategy), []
    if name is StrategyName.STREAM and _is_filtered_on_policy(config):
        parts = [_ON_POLICY[on_policy_fill(config)]]
    if name is StrategyName.ROUNDS:
        wave = config.data.gen_batch_size or config.data.train_batch_size
        most = config.algorithm.filter_groups.max_num_gen_batches
        bound = f"at most {most} for a batch" if most > 0 else "any number for a batch"
        parts = [
            f"waves of {wave} prompts, {bound}, each awaited whole; kept groups beyond the batch "
            "are thrown away, as in verl"
        ]
    if name.uses_probes:
        sizes = {one.actor_rollout_ref.rollout.n for one in source_configs(config).values()}
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


def _filter(config: RunConfig) -> Iterator[Problem]:
    name = StrategyName(config.sluice.sampling.strategy)
    if name is not StrategyName.STREAM and not config.algorithm.filter_groups.enable:
        yield Problem(
            f"{_SAMPLING_KEY}.strategy",
            str(name),
            "with algorithm.filter_groups.enable = false: without the filter every group is "
            "trained, and there is nothing to choose",
            f"set algorithm.filter_groups.enable=true, or {_SAMPLING_KEY}.strategy=stream",
        )


def _rounds(config: RunConfig) -> Iterator[Problem]:
    staleness = config.sluice.asynchrony.max_staleness
    if staleness and StrategyName(config.sluice.sampling.strategy) is StrategyName.ROUNDS:
        yield Problem(
            f"{_SAMPLING_KEY}.strategy",
            "rounds",
            f"with sluice.asynchrony.max_staleness = {staleness}: a batch is trained when its "
            "whole wave is finished, so nothing can overlap",
            f"set sluice.asynchrony.max_staleness=0, or {_SAMPLING_KEY}.strategy=stream",
        )


def _probes(config: RunConfig) -> Iterator[Problem]:
    sampling, n = config.sluice.sampling, config.actor_rollout_ref.rollout.n
    key, probes = f"{_SAMPLING_KEY}.probe_samples", sampling.probe_samples
    if not StrategyName(sampling.strategy).uses_probes:
        return
    if probes < LEAST_SAMPLES:
        yield Problem(
            key,
            probes,
            ": one sample does not show whether the group is mixed",
            f"set it to {LEAST_SAMPLES} or more (4 of 16 is usual)",
        )
    if probes >= n:
        yield Problem(
            key,
            probes,
            f"with {ROLLOUT}.n = {n}: no sample would be left to decide about",
            f"set {key} below {n}, or {_SAMPLING_KEY}.strategy=stream",
        )


def truncation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if training would use truncated samples and nobody has asked for it."""
    evaluates = config.trainer.val_only or config.sluice.rollout.serves_model_files
    if evaluates or config.sluice.sampling.train_truncated:
        return
    for key, value, off in _cuts(config):
        yield Problem(
            f"{ROLLOUT}.{key}",
            value,
            "truncates sampling in training: the engine's logprobs are of the tokens it kept, the "
            "trainer's of all tokens",
            f"set {key}={off} (val_kwargs keep their own), or {_SAMPLING_KEY}.train_truncated=true "
            "to train with the difference",
        )


def sampling_notice(config: RunConfig) -> str | None:
    """Return a warning if top-p or top-k truncates sampling in training, else None.

    Behavior logprobs belong to the truncated distribution: the remaining tokens share all
    probability. The trainer computes logprobs over the whole vocabulary, which are lower.
    """
    actor, cuts = config.actor_rollout_ref.actor, _cuts(config)
    if not cuts or config.trainer.val_only:
        return None
    correction = config.algorithm.rollout_correction.rollout_is
    if correction is not None:
        effect = (
            f"the importance weights (rollout_correction.rollout_is = {correction}) are below 1 by "
            "the mass that was cut off, whatever the staleness"
        )
    elif actor.use_rollout_log_probs:
        effect = (
            "the loss's ratio (use_rollout_log_probs = true) starts below 1 by the mass that was "
            "cut off and may be clipped before any update"
        )
    else:
        effect = (
            "old logprobs are recomputed over all tokens, so the loss takes samples of the "
            "truncated policy for samples of the whole one"
        )
    named = " and ".join(f"{key} = {value:g}" for key, value, _ in cuts)
    return (
        f"{ROLLOUT}: {named} truncate sampling in training: {effect}; "
        "set top_p=1 and top_k=-1 for training (val_kwargs keep their own), or watch "
        "training/rollout_probs_diff_mean"
    )


def _cuts(config: RunConfig) -> list[tuple[str, float, int]]:
    """Return what truncates training samples: key, value, and the value that turns it off."""
    rollout = config.actor_rollout_ref.rollout
    cuts: list[tuple[str, float, int]] = []
    if rollout.top_p < 1.0:
        cuts.append(("top_p", rollout.top_p, 1))
    if rollout.top_k > 0:
        cuts.append(("top_k", rollout.top_k, -1))
    return cuts
