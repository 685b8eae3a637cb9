"""Observe failures. `FailureLog` logs them by reason: the first of a kind in detail, later ones as
a count. `YieldGuard` stops, with an explanation, a run that cannot train: its first groups all fail
for one reason, or almost no group is kept.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from services.reward.group_table import EndCause, EventKind, Group, GroupEnding, GroupEvent
from sluice.algorithm.sampling.admission import REMEDY, YieldFloor
from sluice.errors import BatchUnfillableError, DataExhaustedError
from sluice.types import Failed, FailureKind, PromptEnd, PromptOrigin

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 30.0
MAX_REASONS = 20
_MAX_CHARS = 1000
# The type of an exception, and its place as `place_of` writes it: in a function of the author's.
_TYPE = re.compile(r"\b[A-Z]\w+(?=: | in )")
_PLACE = re.compile(r" in \S+ \([^()]+:\d+\)(?= \(|$)")
# What differs between failures of one kind: quoted values (an apostrophe within a word is no
# quote), paths, hex digits and numbers.
_VARIES = re.compile(
    r"\"[^\"]*\"|(?<!\w)'.*?'(?!\w)|(?<![\w/])/[\w./-]+|\b(?=\w*\d)[\da-fA-F]{6,}\b|\d[\w.:-]*"
)


def reason_of(detail: str) -> str:
    """Return the text that failures of one kind share.

    It is the type and place of an exception in the user's code, else the detail without the parts
    that vary between samples.
    """
    if place := _PLACE.search(detail):
        kind = _TYPE.search(detail)
        return f"{kind.group() if kind else ''}{place.group()}"
    return _VARIES.sub("#", detail[:_MAX_CHARS])


@dataclass(slots=True)
class _Counted:
    number: int
    logged_s: float


class FailureLog:
    """An observer that warns of failures.

    The first failure of a reason gets a line with the prompt and the scorer's innermost frames;
    after that, one line every `COUNT_EVERY_S` gives the count so far. Reasons beyond the first
    `MAX_REASONS` share one such line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reasons: dict[str, _Counted] = {}

    def observe(self, event: GroupEvent) -> None:
        """Note the failures of graded samples, and of groups that failed without graded samples."""
        if event.kind is EventKind.GRADED and event.graded is not None:
            greedy = event.graded.greedy.outcomes if event.graded.greedy else ()
            for outcome in (*event.graded.outcomes, *greedy):
                if isinstance(outcome, Failed):
                    replicas = event.group.progress.replica_names
                    self.note_failure(
                        outcome, f"prompt {event.group.prompt_id} (replica {replicas})"
                    )
        elif event.kind is EventKind.ENDED and event.group.ending is not None:
            self._count_end(event.group, event.group.ending)

    def _count_end(self, group: Group, ending: GroupEnding) -> None:
        if ending.cause is EndCause.OVERLONG:
            place = f"prompt {group.prompt_id} left out (replica {group.progress.replica_names})"
            self.note(ending.detail, "prompts left out", place)
        elif ending.end is PromptEnd.DROPPED_FAILED and ending.cause is EndCause.RESULT:
            outcomes = group.graded.outcomes if group.graded else ()
            if not any(
                isinstance(outcome, Failed) for outcome in outcomes
            ):  # otherwise noted when graded
                replicas = group.progress.replica_names
                place = f"prompt {group.prompt_id} dropped as failed (replica {replicas})"
                self.note(ending.detail, "groups dropped", place)

    def note_failure(self, failed: Failed, place: str) -> None:
        """Log a sample without a score."""
        self.note(f"{failed.kind}: {failed.detail}", "samples", place, failed.frames)

    def note(self, detail: str, unit: str, place: str, frames: tuple[str, ...] = ()) -> None:
        """Count a failure; log it if it is the first of its reason or a count is due."""
        reason, now_s = reason_of(detail), self._clock()
        if reason not in self._reasons and len(self._reasons) >= MAX_REASONS:
            reason, detail = "", f"more kinds of failures, such as {detail}"
        counted = self._reasons.get(reason)
        if counted is None:
            self._reasons[reason] = _Counted(1, now_s)
            frames_text = "".join(f"; at {frame}" for frame in frames)
            logger.warning("%s: %s%s", place, detail, frames_text)
        else:
            counted.number += 1
            if now_s - counted.logged_s >= COUNT_EVERY_S:
                counted.logged_s = now_s
                logger.warning("%s: %d %s so far", detail, counted.number, unit)


_YIELD_ENDS = {
    PromptEnd.FILTERED_ALL_RIGHT,
    PromptEnd.FILTERED_ALL_WRONG,
    PromptEnd.FILTERED_UNIFORM,
    PromptEnd.DROPPED_FAILED,
}

_UNSAMPLED = {EndCause.OVERLONG, EndCause.QUARANTINE}
_KEPT = "kept"


ALIKE_GROUPS = 64
"""The run ends if this many first groups all fail for one reason."""


class YieldGuard:
    """An observer that stops a run whose groups fail or are filtered out, and explains why.

    Args:
        min_yield: least share of kept groups; 0 sets no bound.
        num_groups: the number of last groups that the share covers.
        source: the source whose groups it watches; empty in a run without `sluice.sources`.

    Attributes:
        num_unsampled: prompts in a row that ended as too long or in quarantine.
    """

    def __init__(self, min_yield: float, num_groups: int, source: str = "") -> None:
        self._source = source
        self._floor = YieldFloor(min_yield, num_groups)
        self._ends: deque[str] = deque(maxlen=num_groups)  # how the last groups ended
        self._last_failure = ""
        self._num_left_out, self._last_left_out = 0, ""
        self._num_quarantined = 0
        self.num_unsampled = 0
        self._num_alike: int | None = 0  # ``None``: a group has ended in another way
        self._first_reason = ""
        self._frames: tuple[str, ...] = ()

    def observe(self, event: GroupEvent) -> None:
        """Count a group that was kept, filtered or failed. A prompt that is too long or in
        quarantine says nothing about the yield of others."""
        if event.group.prompt.source != self._source:
            return
        ending = event.group.ending
        if event.kind is EventKind.ENDED and ending is not None:
            self._count_end(event.group, ending)
        elif event.kind in {EventKind.KEPT, EventKind.REQUEUED}:
            self.num_unsampled = 0
        if event.kind is EventKind.KEPT:
            self.note_end(None, "")

    def _count_end(self, group: Group, ending: GroupEnding) -> None:
        if ending.cause in _UNSAMPLED:
            self.num_unsampled += 1
        elif ending.end is not PromptEnd.SKIPPED:
            self.num_unsampled = 0
        match ending.cause:
            case EndCause.OVERLONG:
                self.note_left_out(ending.detail)
            case EndCause.QUARANTINE:
                self._num_quarantined += 1
            case EndCause.RESULT if ending.end in _YIELD_ENDS:
                outcomes = group.graded.outcomes if group.graded else ()
                failed = next(
                    (outcome for outcome in outcomes if isinstance(outcome, Failed)), None
                )
                self._frames = self._frames or (failed.frames if failed else ())
                # A replica that was lost says nothing about the groups to come.
                may_pass = failed is None and not group.progress.engine_answered
                is_lost = ending.detail.startswith(FailureKind.ENGINE_ERROR) and may_pass
                # Neither a client's prompts, nor an outage after the first step or a restart, may
                # end the run for everyone.
                is_first = group.prompt.origin is PromptOrigin.DATASET
                counts = is_first and not group.version and not is_lost
                self.note_end(ending.end, ending.detail, counts_alike=counts)

    def note_end(self, end: PromptEnd | None, detail: str, *, counts_alike: bool = True) -> None:
        """Note how a group ended.

        Args:
            end: how it ended; ``None`` if it was kept.
            detail: why.
            counts_alike: whether it counts among the first groups that may all fail alike.
        """
        self._ends.append(_KEPT if end is None else end.value)
        if end is PromptEnd.DROPPED_FAILED:
            self._last_failure = detail
        if counts_alike and self._num_alike is not None:
            if end is PromptEnd.DROPPED_FAILED:
                reason = reason_of(detail)
                self._first_reason = self._first_reason or reason
                self._num_alike = self._num_alike + 1 if reason == self._first_reason else None
            else:
                self._num_alike = None

    def note_left_out(self, detail: str) -> None:
        """Note a prompt that was left out because it exceeds data.max_prompt_length."""
        self._num_left_out += 1
        self._last_left_out = detail

    def begin_again(self) -> None:
        """Forget the last groups, since another policy samples the next ones."""
        self._ends.clear()
        self.num_unsampled = 0

    def check_yield(self) -> None:
        """Raise `BatchUnfillableError` if the first groups all failed for one reason, or too few of
        the last groups were kept (`YieldFloor`)."""
        if self._num_alike is not None and self._num_alike >= ALIKE_GROUPS:
            at = "".join(f"; at {frame}" for frame in self._frames)
            raise BatchUnfillableError(
                f"the first {self._num_alike} groups all failed for one reason: "
                f"{self._last_failure}{at}; {_remedy(self._last_failure)}"
            )
        num_kept = self._ends.count(_KEPT)
        if self._floor.is_hopeless(num_kept, len(self._ends)):
            remedy = REMEDY
            if self._source:
                remedy += f", or leave the source '{self._source}' out"
            raise self._floor.error(num_kept, self._summary(), remedy)

    def exhausted_error(self, num_kept: int, batch_size: int) -> DataExhaustedError:
        """Return the error for a data set that ended before the batch was full."""
        if self._num_left_out and not self._ends:
            remedy = "raise data.max_prompt_length, set data.truncation, or give shorter prompts"
        elif self._source:  # a source repeats its rows, so none of them can start
            remedy = f"give other rows in sluice.sources.{self._source}.files"
            if self._num_quarantined:
                remedy += ", or release prompts: delete their lines in reward/quarantine.jsonl"
        else:
            remedy = (
                "raise trainer.total_epochs, give more rows in data.train_files, or lower "
                "data.train_batch_size"
            )
        return DataExhaustedError(
            f"the data set is exhausted with {num_kept} of {batch_size} groups for the next batch"
            f"{self._summary()}; {remedy}"
        )

    def _summary(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in sorted(Counter(self._ends).items()))
        failure = f"; last failure: {self._last_failure}" if self._last_failure else ""
        left_out = ""
        if self._num_left_out:
            left_out = f"; {self._num_left_out} left out as too long, last: {self._last_left_out}"
        if self._num_quarantined:
            left_out += f"; {self._num_quarantined} in quarantine (reward/quarantine.jsonl)"
        of = f" of the source '{self._source}'" if self._source else ""
        return f" (last {len(self._ends)} groups{of}: {counts or 'none'}{left_out}{failure})"


def _remedy(detail: str) -> str:
    if FailureKind.ENGINE_ERROR in detail:
        return "look at the logs of the replicas, and start the run again"
    return "repair what grades responses (`sluice doctor` calls it), and start the run again"
