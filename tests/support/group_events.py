"""Events of groups, for tests of one observer alone."""

from __future__ import annotations

from services.reward.generation.request import GroupProgress
from services.reward.group_table import EventKind, Group, GroupEnding, GroupEvent, GroupState
from sluice.algorithm.sampling.attempt import Attempt
from sluice.types import GradedGroup, Prompt, PromptEnd
from tests.support.client_prompt import client_prompt


def group_ended(
    prompt: Prompt | None = None,
    end: PromptEnd = PromptEnd.DROPPED_FAILED,
    *,
    attempt: Attempt | None = None,
    version: int | None = 1,
    started_s: float = 0.0,
    replicas: tuple[str, ...] = ("a",),
    step: int | None = None,
    graded: GradedGroup | None = None,
) -> GroupEvent:
    """Return the end of a group, by default without samples; with no `version` it never started."""
    attempt = attempt or Attempt("aa", 3, None, 4)
    group = Group(
        prompt or client_prompt(),
        GroupState.ENDED,
        ending=GroupEnding(end, step=step),
        admitted_as=attempt,
        attempt=attempt,
        version=version,
        started_s=started_s,
        graded=graded,
        progress=GroupProgress(replicas=list(replicas)),
    )
    return GroupEvent(EventKind.ENDED, group, GroupState.GENERATING)
