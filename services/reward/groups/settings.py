"""The rules of groups and batches, read from a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath

from services.reward.records.episode_counts import EnvironmentNames
from sluice.algorithm.episode_rules import TOOL_AGENT, EpisodeRules
from sluice.algorithm.groups.filter import (
    GroupNeeds,
    OutcomeAction,
    OutcomePolicy,
    OutcomeRule,
)
from sluice.algorithm.groups.stragglers import StragglerRules
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.config.derived import (
    batch_invariant,
    max_row_tokens,
    needs_greedy_baseline,
    needs_whole_groups,
    on_policy_fill,
)
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.config.schema.service import ScoringFailureConfig
from sluice.types import FailureKind, SamplingParams


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of the groups of a source.

    After the `first_samples` of a group, the strategy decides about the rest. `greedy` adds one
    response per prompt as a baseline. `needs` defines which groups can be trained. `epoch_rows` is
    the size of the data set, 0 without one.
    """

    samples_per_group: int
    first_samples: int
    sampling: SamplingParams
    filter_metric: str | None
    greedy: SamplingParams | None
    needs: GroupNeeds
    epoch_rows: int


def group_settings(config: RunConfig, epoch_rows: int) -> GroupSettings:
    """Return the group settings of a source with this configuration."""
    rollout, group_filter = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    sampling = training_sampling(rollout, config.data.max_response_length)
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)  # always the most likely token
    rules = sampling_rules(config)
    return GroupSettings(
        samples_per_group=rollout.n,
        first_samples=rules.probe_samples if rules.strategy.uses_probes else rollout.n,
        sampling=sampling,
        filter_metric=group_filter.metric if group_filter.enable else None,
        greedy=greedy if needs_greedy_baseline(config) else None,
        needs=GroupNeeds(
            needs_whole_groups(config),
            config.sluice.reward.outcomes.min_share,
            outcome_policy(config),
        ),
        epoch_rows=epoch_rows,
    )


def training_sampling(rollout: RolloutConfig, max_tokens: int) -> SamplingParams:
    """Return the training parameters; `for_prompt` sets the seed of each prompt."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=max_tokens,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def validation_sampling(
    rollout: RolloutConfig, max_tokens: int, temperature: float | None
) -> SamplingParams:
    """Return the validation parameters; `temperature` overrides the configured one."""
    configured = rollout.val_kwargs
    return SamplingParams(
        temperature=configured.temperature if temperature is None else temperature,
        top_p=configured.top_p,
        top_k=configured.top_k,
        max_tokens=max_tokens,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def sampling_rules(config: RunConfig) -> SamplingRules:
    """Return the rules of the run's strategy."""
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
    """Return the groups of one round of generation: a wave, or a train batch without waves."""
    has_waves = rules.strategy is StrategyName.ROUNDS
    return rules.gen_batch_size if has_waves else rules.train_batch_size


def straggler_rules(config: RunConfig) -> StragglerRules:
    """Return the rules for giving up streams and groups.

    Without partial tokens a long sample looks like a stuck one, so only
    `sluice.reward.generate_timeout_s` ends a stream. If a run must be reproducible bit for bit, no
    stream is moved for being slow: that depends on timing, and the logprobs of a continued sample
    differ from those of an uninterrupted one by rounding.
    """
    reward = config.sluice.reward
    sees_tokens = reward.partial_interval_ms > 0
    return StragglerRules(
        stall_timeout_s=reward.stall_timeout_s if sees_tokens else None,
        slow_factor=reward.slow_factor if sees_tokens and not batch_invariant(config) else None,
        group_deadline_s=reward.group_deadline_s,
        group_token_budget=reward.group_token_budget,
    )


def episode_rules(config: RunConfig) -> EpisodeRules:
    """Return the limits of episodes."""
    turns, environment = config.actor_rollout_ref.rollout.multi_turn, config.sluice.environment
    actor, longest = config.actor_rollout_ref.actor, max_row_tokens(config.data)
    pass_tokens = actor.ppo_max_token_len_per_gpu * actor.fsdp_config.ulysses_sequence_parallel_size
    has_verls_tools = bool(turns.function_tool_path or turns.tool_config_path)
    return EpisodeRules(
        max_sequence_tokens=longest,
        max_response_tokens=config.data.max_response_length if has_verls_tools else None,
        max_trained_tokens=max(longest, pass_tokens),
        max_assistant_turns=turns.max_assistant_turns,
        max_user_turns=turns.max_user_turns,
        max_parallel_calls=turns.max_parallel_calls,
        max_tool_response_length=turns.max_tool_response_length,
        truncate_side=turns.tool_response_truncate_side,
        max_invalid_calls=environment.max_invalid_calls,
        timeout_s=environment.episode_timeout_s,
        grades_whole_text=has_verls_tools,
    )


def plays_by_default(config: RunConfig) -> bool:
    """Return whether rows without `agent_name` have an environment."""
    environment = config.sluice.environment
    rollout = config.actor_rollout_ref.rollout
    is_given = environment.path is not None or bool(environment.addresses) or environment.agents
    return is_given or rollout.multi_turn.enable or rollout.agent.default_agent_loop == TOOL_AGENT


def environment_names(config: RunConfig) -> EnvironmentNames:
    """Return how files and metrics name environments: a file's class, or the file."""
    environment, by_default = config.sluice.environment, plays_by_default(config)
    if environment.path is not None:
        name = environment.name or PurePath(environment.path).stem
        return EnvironmentNames(name, rows_choose=False, by_default=by_default)
    name = "served" if environment.addresses else TOOL_AGENT
    return EnvironmentNames("agents" if environment.agents else name, by_default=by_default)


def outcome_policy(config: RunConfig) -> OutcomePolicy:
    """Return `sluice.reward.outcomes` as rules; the dispatcher counts the engine's attempts."""
    outcomes = config.sluice.reward.outcomes
    return OutcomePolicy(
        {
            FailureKind.UNSCORABLE: _rule(outcomes.unscorable),
            FailureKind.SCORER_TIMEOUT: _rule(outcomes.scorer_timeout),
            FailureKind.SCORER_CRASH: _rule(outcomes.scorer_crash),
            FailureKind.ENGINE_ERROR: OutcomeRule(OutcomeAction(outcomes.engine_error.then)),
            FailureKind.ABORTED: OutcomeRule(OutcomeAction(outcomes.aborted.then)),
            FailureKind.ENVIRONMENT: OutcomeRule(OutcomeAction(outcomes.environment.then)),
            FailureKind.AGENT: OutcomeRule(OutcomeAction(outcomes.agent.then)),
        }
    )


def _rule(failure: ScoringFailureConfig) -> OutcomeRule:
    return OutcomeRule(
        OutcomeAction(failure.action), failure.max_attempts, OutcomeAction(failure.then)
    )
