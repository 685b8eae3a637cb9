"""What the limits for stragglers need of each other and of the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config import derived
from sluice.config.run import RunConfig

_KEY = "sluice.reward"
# Signs of life come every second interval at most, and one of them may be late.
INTERVALS_BEFORE_A_STALL = 4


def straggler_problems(config: RunConfig) -> Iterator[str]:
    """A sentence with the remedy for each limit that would end what is well."""
    reward, interval_s = config.sluice.reward, config.sluice.reward.partial_interval_ms / 1000
    least_s = INTERVALS_BEFORE_A_STALL * interval_s
    if reward.stall_timeout_s < least_s:
        yield (
            f"{_KEY}.stall_timeout_s = {reward.stall_timeout_s:g} with {_KEY}.partial_interval_ms "
            f"= {reward.partial_interval_ms}: a group that gets on would count as stalled; set "
            f"stall_timeout_s to at least {least_s:g}, {INTERVALS_BEFORE_A_STALL} intervals"
        )
    longest, budget = derived.max_resp_len(config), reward.group_token_budget
    if budget is not None and budget < longest:
        yield (
            f"{_KEY}.group_token_budget = {budget} is below the response limit of {longest} "
            "tokens: one response could use up its group's; raise it, or set it to null"
        )
