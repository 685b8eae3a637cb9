"""What an upgrade replaces, seen by rendering twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tools.helm_test.documents import END_OF_RUN, Rendered

# Autoscaling, which is no part of a pod, wants metrics, which are.
_BEFORE: dict[str, Any] = {"metrics": {"enabled": True}}
_KEPT: tuple[dict[str, Any], ...] = (
    {},
    {"trainer": {"backoffLimit": 20}},
    {"rollout": {"replicas": 7}},
    {"rollout": {"autoscaling": {"enabled": True}}},
    {"rollout": {"podDisruptionBudget": {"maxUnavailable": 2}}},
    {"networkPolicy": {"enabled": False}},
)
_REPLACED: tuple[dict[str, Any], ...] = (
    {"run": {"name": "second"}},
    {"run": {"settings": ["trainer.save_freq=7"]}},
    {"run": {"files": {"a.py": "x = 1"}}},
    {"image": {"compute": {"tag": 2}}},
    {"trainer": {"ranks": 2}},
    {"shutdownGraceSeconds": 30},
)


def upgrade_problems(render: Callable[[dict[str, Any], int], Rendered]) -> Iterator[str]:
    """Pods of a Job cannot be changed, so that its name has to follow them, and them alone.

    What ends the run is there anew with each revision: an upgrade of a run that has ended gives
    its replicas back, and the Job that took them away is over.

    Args:
        render: values and the release's revision.
    """
    before = render(_BEFORE, 1)
    for values in _KEPT:
        if _job(render(_BEFORE | values, 2), "trainer") != _job(before, "trainer"):
            yield f"{values}: replaces the trainer"
    for values in _REPLACED:
        after = render(_BEFORE | values, 2)
        if _job(after, "trainer")[0] == _job(before, "trainer")[0]:
            yield f"{values}: changes the pod of a Job that is there"
    if _job(render(_BEFORE, 2), END_OF_RUN)[0] == _job(before, END_OF_RUN)[0]:
        yield "after an upgrade nobody ends the run once more"


def _job(rendered: Rendered, component: str) -> tuple[str, object]:
    """The Job's name and its pod."""
    job = rendered.pod(component).owner
    return str(job["metadata"]["name"]), job["spec"]["template"]
