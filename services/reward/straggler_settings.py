"""The rules about stragglers that a run's configuration asks for."""

from __future__ import annotations

from sluice.algorithm.stragglers import StragglerRules
from sluice.config.derived import batch_invariant
from sluice.config.run import RunConfig


def straggler_rules(config: RunConfig) -> StragglerRules:
    """When streams and groups are given up on.

    Without partial tokens nobody can tell a long sample from a stuck one, so that only
    `sluice.reward.generate_timeout_s` ends a stream. Where a run must repeat itself bit by bit, no
    stream is moved for being slow: which one is, is a matter of timing, and a continued sample's
    logprobs differ from an unbroken one's by rounding.
    """
    reward = config.sluice.reward
    sees_tokens = reward.partial_interval_ms > 0
    return StragglerRules(
        stall_timeout_s=reward.stall_timeout_s if sees_tokens else None,
        slow_factor=reward.slow_factor if sees_tokens and not batch_invariant(config) else None,
        group_deadline_s=reward.group_deadline_s,
        group_token_budget=reward.group_token_budget,
    )
