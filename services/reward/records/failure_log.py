"""Log failures by their reason: the first of a kind with all that helps, the others as a count."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.reward.group_table import EndCause, EventKind, Group, GroupEnding, GroupEvent
from sluice.types import Failed, GradedGroup, PromptEnd

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 30.0
MOST_REASONS = 20
_MOST_CHARACTERS = 1000
# The type of an exception, and its place as `place_of` writes it: in a function of the author's.
_TYPE = re.compile(r"\b[A-Z]\w+(?=: | in )")
_PLACE = re.compile(r" in \S+ \([^()]+:\d+\)(?= \(|$)")
# What differs between failures of one kind: quoted values (an apostrophe within a word is no
# quote), paths, hex digits and numbers.
_VARIES = re.compile(
    r"\"[^\"]*\"|(?<!\w)'.*?'(?!\w)|(?<![\w/])/[\w./-]+|\b(?=\w*\d)[\da-fA-F]{6,}\b|\d[\w.:-]*"
)


def reason_of(detail: str) -> str:
    """Return what the failures of one kind share.

    It is the type and the place of an exception in the author's code, else the detail without
    what differs from sample to sample.
    """
    if place := _PLACE.search(detail):
        kind = _TYPE.search(detail)
        return f"{kind.group() if kind else ''}{place.group()}"
    return _VARIES.sub("#", detail[:_MOST_CHARACTERS])


@dataclass(slots=True)
class _Counted:
    number: int
    logged_s: float


class FailureLog:
    """An observer that warns of failures.

    The first failure of a reason gets a line with the prompt and the last frames of the scorer;
    then one line every `COUNT_EVERY_S` says how many there are so far. Reasons beyond the first
    `MOST_REASONS` share one such line.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reasons: dict[str, _Counted] = {}

    def observe(self, event: GroupEvent) -> None:
        """Note the failures of graded samples, and of groups that failed without such samples."""
        if event.kind is EventKind.GRADED and event.graded is not None:
            self._graded(event.group, event.graded)
        elif event.kind is EventKind.ENDED and event.group.ending is not None:
            self._ended(event.group, event.group.ending)

    def _graded(self, group: Group, graded: GradedGroup) -> None:
        where = f"prompt {group.prompt_id} (replica {group.progress.replica_names})"
        greedy = graded.greedy.outcomes if graded.greedy else ()
        for outcome in (*graded.outcomes, *greedy):
            if isinstance(outcome, Failed):
                self.failed(outcome, where)

    def _ended(self, group: Group, ending: GroupEnding) -> None:
        replicas = f"(replica {group.progress.replica_names})"
        if ending.cause is EndCause.OVERLONG:
            where = f"prompt {group.prompt_id} left out {replicas}"
            self.note(ending.detail, "prompts left out", where)
        elif ending.end is PromptEnd.DROPPED_FAILED and ending.cause is EndCause.RESULT:
            outcomes = group.graded.outcomes if group.graded else ()
            if not any(isinstance(one, Failed) for one in outcomes):  # else noted when graded
                where = f"prompt {group.prompt_id} dropped as failed {replicas}"
                self.note(ending.detail, "groups dropped", where)

    def failed(self, failed: Failed, where: str) -> None:
        """Note a sample without a score."""
        self.note(f"{failed.kind}: {failed.detail}", "samples", where, failed.frames)

    def note(self, detail: str, unit: str, where: str, frames: tuple[str, ...] = ()) -> None:
        """Count one failure, and log it if it is the first of its reason or a count is due.

        Args:
            detail: what happened.
            unit: what is counted.
            where: the prompt and its replica.
            frames: of the exception, the last first.
        """
        reason, now = reason_of(detail), self._clock()
        if reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
            reason, detail = "", f"more kinds of failures, such as {detail}"
        counted = self._reasons.get(reason)
        if counted is None:
            self._reasons[reason] = _Counted(1, now)
            shown = "".join(f"; at {frame}" for frame in frames)
            logger.warning("%s: %s%s", where, detail, shown)
        else:
            counted.number += 1
            if now - counted.logged_s >= COUNT_EVERY_S:
                counted.logged_s = now
                logger.warning("%s: %d %s so far", detail, counted.number, unit)
