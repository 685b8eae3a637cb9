"""What an upgrade replaces, seen by rendering twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tools.helm_test.documents import Rendered

_KEPT: tuple[dict[str, Any], ...] = (
    {"rollout": {"replicas": 7}},
    {"rollout": {"autoscaling": {"enabled": True}}},
    {"rollout": {"podDisruptionBudget": {"maxUnavailable": 2}}},
    {"networkPolicy": {"enabled": False}},
)
_REPLACED: tuple[dict[str, Any], ...] = (
    {"run": {"name": "second"}},
    {"run": {"settings": ["trainer.save_freq=7"]}},
    {"run": {"files": {"a.py": "x = 1"}}},
    {"image": {"compute": {"tag": "2"}}},
    {"trainer": {"ranks": 2}},
    {"shutdownGraceSeconds": 30},
)


def upgrade_problems(render: Callable[[dict[str, Any]], Rendered]) -> Iterator[str]:
    """Pods of a Job cannot be changed, so that its name has to follow them, and them alone."""
    before = render({})
    for values in _KEPT:
        if _trainer(render(values)) != _trainer(before):
            yield f"{values}: replaces the trainer"
    for values in _REPLACED:
        after = render(values)
        if _trainer(after)[0] == _trainer(before)[0]:
            yield f"{values}: changes the pod of a Job that is there"


def _trainer(rendered: Rendered) -> tuple[str, object]:
    """The Job's name and its pod."""
    job = rendered.pod("trainer").owner
    return str(job["metadata"]["name"]), job["spec"]["template"]
