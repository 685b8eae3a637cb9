"""Groups for the page, read from lines of the archive or of verl's dumps of validations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from sluice.dashboard.line_tail import UNREADABLE, TailLine
from sluice.telemetry.samples import SampledGroup, SampledResponse
from sluice.types import PromptEnd

MAX_STEP = (1 << 31) - 1
MAX_GROUP_BYTES = 256 << 20

_OWN_COLUMNS = frozenset({"input", "output", "gts", "score", "step", "reward", "uid"})


class SampleSource(StrEnum):
    """The writer of a file of samples."""

    ARCHIVE = "archive"
    VALIDATION = "validation"


class ShownOutcome(StrEnum):
    """The outcome of a group as the page names it."""

    TRAINED = "trained"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    UNIFORM = "uniform"
    STALE = "stale"
    FAILED = "failed"
    SURPLUS = "surplus"
    VALIDATION = "validation"


_BY_END = {
    PromptEnd.TRAINED.value: ShownOutcome.TRAINED,
    PromptEnd.FILTERED_ALL_RIGHT.value: ShownOutcome.ALL_RIGHT,
    PromptEnd.FILTERED_ALL_WRONG.value: ShownOutcome.ALL_WRONG,
    PromptEnd.FILTERED_UNIFORM.value: ShownOutcome.UNIFORM,
    PromptEnd.DROPPED_STALE.value: ShownOutcome.STALE,
    PromptEnd.DROPPED_FAILED.value: ShownOutcome.FAILED,
    PromptEnd.DROPPED_SURPLUS.value: ShownOutcome.SURPLUS,
}


class DumpRow(msgspec.Struct, frozen=True):
    """A row of `sluice.telemetry.samples`, or of verl's own dumps."""

    input: str
    output: str
    step: int
    score: float | None = None
    reward: float | None = None
    gts: Any = None
    uid: str | None = None


_decode_group = msgspec.json.Decoder(SampledGroup).decode
_decode_row = msgspec.json.Decoder(DumpRow).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode


class GroupLines(msgspec.Struct, frozen=True):
    """A group as the index keeps it.

    Args:
        offset, length: its bytes in the file; several lines of a dump.
        step: the step that trained it, or else its intended step; for a validation the version.
        outcome: its outcome as the page names it.
        num_responses: the number of its responses.
        mean_score: the mean over scored responses; NaN without any.
    """

    offset: int
    length: int
    step: int
    outcome: ShownOutcome
    num_responses: int
    mean_score: float


@dataclass(slots=True)
class _OpenGroup:
    """Rows of a dump that belong together; further rows may follow."""

    key: tuple[str, str]
    step: int
    begin: int
    end: int
    num: int = 0
    num_scored: int = 0
    total_score: float = 0.0

    def accepts(self, line: TailLine, row: DumpRow) -> bool:
        """Return whether the row belongs to it. A group that is too large to show is cut."""
        length = line.offset + len(line.text) - self.begin
        return self.key == _group_key(row) and length <= MAX_GROUP_BYTES

    def add(self, line: TailLine, row: DumpRow) -> None:
        self.end = line.offset + len(line.text)
        self.num += 1
        if row.score is not None:
            self.num_scored += 1
            self.total_score += row.score

    def close(self, outcome: ShownOutcome) -> GroupLines:
        mean = self.total_score / self.num_scored if self.num_scored else float("nan")
        return GroupLines(self.begin, self.end - self.begin, self.step, outcome, self.num, mean)


class GroupReader:
    """The groups in the lines of one file, which may come in any pieces.

    Rows of a dump belong together if they follow each other with the same ``uid``, or, without
    one, with the same prompt.

    Attributes:
        num_unread: lines that are not groups; they are skipped.
    """

    def __init__(self, kind: SampleSource) -> None:
        self._kind = kind
        self._open: _OpenGroup | None = None
        self.num_unread = 0

    def take(self, lines: Sequence[TailLine]) -> Iterator[GroupLines]:
        """Yield the groups that further lines complete."""
        for line in lines:
            group = (
                self._read_record(line)
                if self._kind is SampleSource.ARCHIVE
                else self._read_dump_row(line)
            )
            if group is not None:
                yield group

    def end(self) -> Iterator[GroupLines]:
        """Yield the last group, at the end of the file."""
        if self._open is not None:
            yield self._open.close(ShownOutcome(self._kind.value))
            self._open = None

    def _read_record(self, line: TailLine) -> GroupLines | None:
        group = _sampled_group(line.text)
        step = 0 if group is None else group.version + 1 if group.step is None else group.step
        if group is None or abs(step) > MAX_STEP:
            self._note_unread(line)
            return None
        scores = [response.score for response in group.responses if response.score is not None]
        return GroupLines(
            line.offset,
            len(line.text),
            step,
            _BY_END.get(group.end, ShownOutcome.FAILED),
            len(group.responses),
            sum(scores) / len(scores) if scores else float("nan"),
        )

    def _read_dump_row(self, line: TailLine) -> GroupLines | None:
        row, closed = dump_row(line.text), None
        if row is None or abs(row.step) > MAX_STEP:
            self._note_unread(line)
            return None
        if self._open is not None and not self._open.accepts(line, row):
            closed = self._open.close(ShownOutcome(self._kind.value))
            self._open = None
        if self._open is None:
            self._open = _OpenGroup(_group_key(row), row.step, line.offset, line.offset)
        self._open.add(line, row)
        return closed

    def _note_unread(self, line: TailLine) -> None:
        self.num_unread += bool(line.text.strip())


def read_group(kind: SampleSource, text: bytes) -> SampledGroup | None:
    """Return a group from the bytes that `GroupLines` names; ``None``: they hold no group."""
    if kind is SampleSource.ARCHIVE:
        return _sampled_group(text)
    rows = [(line, row) for line in text.split(b"\n") if (row := dump_row(line)) is not None]
    if not rows:
        return None
    first_row = rows[0][1]
    return SampledGroup(
        prompt_id=first_row.uid or "",
        end=kind.value,
        version=first_row.step,
        ended_at=0.0,
        prompt=first_row.input,
        ground_truth=truth_text(first_row.gts),
        responses=[_dumped_response(line, row) for line, row in rows],
    )


def truth_text(gts: object) -> str:
    """Return a dump's ground truth as records have it: a text as it is, other values as JSON."""
    if gts is None or isinstance(gts, str):
        return gts or ""
    return msgspec.json.encode(gts).decode()


def _dumped_response(line: bytes, row: DumpRow) -> SampledResponse:
    extras = {}
    for name, value in _decode_any(line).items():
        if name not in _OWN_COLUMNS and isinstance(value, int | float):
            try:
                extras[name] = float(value)
            except OverflowError:
                extras[name] = float("inf") if value > 0 else float("-inf")
    return SampledResponse(
        row.output, 0, "", score=row.score, reward=row.reward, metrics={**extras}
    )


def _group_key(row: DumpRow) -> tuple[str, str]:
    return ("uid", row.uid) if row.uid is not None else ("input", row.input)


def _sampled_group(text: bytes) -> SampledGroup | None:
    try:
        return _decode_group(text)
    except UNREADABLE:
        return None


def dump_row(text: bytes) -> DumpRow | None:
    """Return a row of a dump; ``None``: the line holds none."""
    try:
        return _decode_row(text)
    except UNREADABLE:
        return None
