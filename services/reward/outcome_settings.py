"""The rules about samples without a score that a run's configuration asks for."""

from __future__ import annotations

from sluice.algorithm.outcome_policy import OutcomeAction, OutcomePolicy, OutcomeRule
from sluice.config.run import RunConfig
from sluice.config.sample_outcomes import ScoringFailureConfig
from sluice.types import FailureKind


def outcome_policy(config: RunConfig) -> OutcomePolicy:
    """`sluice.reward.outcomes` as rules; the engine's attempts are counted by the dispatcher."""
    outcomes = config.sluice.reward.outcomes
    return OutcomePolicy(
        {
            FailureKind.UNSCORABLE: _rule(outcomes.unscorable),
            FailureKind.SCORER_TIMEOUT: _rule(outcomes.scorer_timeout),
            FailureKind.SCORER_CRASH: _rule(outcomes.scorer_crash),
            FailureKind.ENGINE_ERROR: OutcomeRule(OutcomeAction(outcomes.engine_error.then)),
            FailureKind.ABORTED: OutcomeRule(OutcomeAction(outcomes.aborted.then)),
        }
    )


def _rule(failure: ScoringFailureConfig) -> OutcomeRule:
    return OutcomeRule(
        OutcomeAction(failure.action), failure.max_attempts, OutcomeAction(failure.then)
    )
