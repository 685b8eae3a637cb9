"""Which alerts have fired, and which of them must not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["DOWN", "EVER_FIRED", "firing", "judge"]

DOWN = "SluiceProcessDown"
EVER_FIRED = 'max_over_time(ALERTS{alertstate="firing"}[1d])'
"""Every alert that fired at any time of the run."""
# True of a healthy run whose machine is too slow for it, so that they tell nothing here.
_OF_THE_LOAD = frozenset({"SluiceTrainerStarved", "SluiceQueueStarved"})


def firing(alert: str) -> str:
    """The query for one alert that fires."""
    return f'ALERTS{{alertname="{alert}", alertstate="firing"}}'


def judge(
    fired: Sequence[tuple[Mapping[str, str], float]], expected: tuple[str, str] | None
) -> tuple[list[str], list[str]]:
    """Alerts that must not have fired, and those that tell only that the machine is slow.

    Args:
        fired: labels and values of alerts.
        expected: the alert that may fire, and of which process; ``None``: none may.
    """
    wrong, slow = set[str](), set[str]()
    for labels, _ in fired:
        name, whose = labels["alertname"], labels.get("instance") or labels.get("run", "")
        if name in _OF_THE_LOAD:
            slow.add(name)
        elif (name, whose) != expected:
            wrong.add(f"{name} {whose}".strip())
    return sorted(wrong), sorted(slow)
