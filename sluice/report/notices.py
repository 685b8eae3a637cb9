"""What a person who watched the run would say about its numbers."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.telemetry.metric_names import GROUPS_ALL_RIGHT, GROUPS_ALL_WRONG, GROUPS_KEPT

_LOW_YIELD, _MIN_GROUPS = 0.05, 64
_ONE_SIDED = 0.8


def num_decided_groups(metrics: Mapping[str, float]) -> float:
    """Return the number of groups that the filter kept or dropped for the batch of a step."""
    return sum(metrics.get(name, 0.0) for name in (GROUPS_KEPT, GROUPS_ALL_RIGHT, GROUPS_ALL_WRONG))


def groups_since(before: Mapping[str, int], now: Mapping[str, int], kept: int) -> dict[str, float]:
    """Return the groups that the filter decided about between two states of a run, as metrics.

    A step that finds no mixed groups does not end, so its metrics would come too late.

    Args:
        before: prompts by end, at the last step.
        now: the same at the moment.
        kept: groups that wait for a batch.
    """
    ends = {GROUPS_ALL_RIGHT: "filtered_all_right", GROUPS_ALL_WRONG: "filtered_all_wrong"}
    decided = {name: float(now.get(end, 0) - before.get(end, 0)) for name, end in ends.items()}
    return {GROUPS_KEPT: float(kept), **decided}


def low_yield(metrics: Mapping[str, float]) -> str:
    """Return a notice if less than 5 % of a step's groups were mixed; empty otherwise.

    Args:
        metrics: of one step.
    """
    kept, decided = metrics.get(GROUPS_KEPT, 0.0), num_decided_groups(metrics)
    if decided < _MIN_GROUPS or kept >= _LOW_YIELD * decided:
        return ""
    right = metrics.get(GROUPS_ALL_RIGHT, 0.0) / decided
    wrong = metrics.get(GROUPS_ALL_WRONG, 0.0) / decided
    advice = "most of the sampled tokens train nothing"
    if right >= _ONE_SIDED:
        advice = "the data has become too easy: use harder prompts, or end the run"
    elif wrong >= _ONE_SIDED:
        advice = "the data is too hard: use easier prompts, or check the reward function"
    return (
        f"only {kept / decided:.1%} of the groups are mixed ({right:.0%} all right, "
        f"{wrong:.0%} all wrong): {advice}"
    )
