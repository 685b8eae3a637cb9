"""What the page shows of a group, read from lines of the archive or of verl's dumps of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from sluice.dashboard.line_tail import Line
from sluice.telemetry.sampled_group import SampledGroup, SampledResponse
from sluice.types import PromptEnd

__all__ = ["GroupLines", "Kind", "ShownOutcome", "groups_of", "shown_group"]


class Kind(StrEnum):
    """What wrote a file of samples."""

    ARCHIVE = "archive"
    TRAINED = "trained"
    VALIDATION = "validation"


class ShownOutcome(StrEnum):
    """How a group is called in the page."""

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
_OWN_COLUMNS = frozenset({"input", "output", "gts", "score", "step", "reward", "uid"})


class _DumpRow(msgspec.Struct):
    """A row of `sluice.telemetry.sample_dump`, or of verl's own dumps."""

    input: str
    output: str
    step: int
    score: float | None = None
    reward: float | None = None
    gts: Any = None
    uid: str | None = None


_decode_group = msgspec.json.Decoder(SampledGroup).decode
_decode_row = msgspec.json.Decoder(_DumpRow).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode


class GroupLines(msgspec.Struct, frozen=True):
    """A group as the index keeps it.

    Args:
        offset, length: its bytes in the file; several lines of a dump.
        step: that trained it; of others the one it was drawn for; of a validation the version.
        outcome: as the page calls it.
        num_responses: of the group.
        mean_score: over scored responses; NaN without any.
    """

    offset: int
    length: int
    step: int
    outcome: ShownOutcome
    num_responses: int
    mean_score: float


def groups_of(kind: Kind, lines: Sequence[Line]) -> Iterator[GroupLines]:
    """The groups in lines of one file; lines that cannot be read are passed over.

    Rows of a dump belong together if they follow each other with the same ``uid``, or, without
    one, with the same prompt.
    """
    if kind is Kind.ARCHIVE:
        for line in lines:
            if (group := _group(line.text)) is not None:
                yield _archived(line, group)
        return
    outcome = ShownOutcome(kind.value)
    open_rows: list[tuple[Line, _DumpRow]] = []
    for line in lines:
        row = _row(line.text)
        if row is None:
            continue
        if open_rows and _key(open_rows[-1][1]) != _key(row):
            yield _dumped(open_rows, outcome)
            open_rows = []
        open_rows.append((line, row))
    if open_rows:
        yield _dumped(open_rows, outcome)


def shown_group(kind: Kind, text: bytes) -> SampledGroup | None:
    """A group whole, from the bytes that `GroupLines` names; ``None``: they hold no such thing."""
    if kind is Kind.ARCHIVE:
        return _group(text)
    rows = [(line, row) for line in text.split(b"\n") if (row := _row(line)) is not None]
    if not rows:
        return None
    first = rows[0][1]
    return SampledGroup(
        prompt_id=first.uid or "",
        end=kind.value,
        version=first.step,
        ended_at=0.0,
        prompt=first.input,
        step=first.step if kind is Kind.TRAINED else None,
        ground_truth="" if first.gts is None else str(first.gts),
        responses=[_dumped_response(line, row) for line, row in rows],
    )


def outcome_of(kind: Kind, group: SampledGroup) -> ShownOutcome:
    """How a group of a file is called."""
    if kind is Kind.ARCHIVE:
        return _BY_END.get(group.end, ShownOutcome.FAILED)
    return ShownOutcome(kind.value)


def step_of(group: SampledGroup) -> int:
    """The step that trained it, or for which it was drawn."""
    return group.version + 1 if group.step is None else group.step


def mean_score(responses: Sequence[SampledResponse]) -> float:
    """Over the scored ones; NaN without any."""
    scores = [response.score for response in responses if response.score is not None]
    return sum(scores) / len(scores) if scores else float("nan")


def _archived(line: Line, group: SampledGroup) -> GroupLines:
    return GroupLines(
        line.offset,
        len(line.text),
        step_of(group),
        outcome_of(Kind.ARCHIVE, group),
        len(group.responses),
        mean_score(group.responses),
    )


def _dumped(rows: Sequence[tuple[Line, _DumpRow]], outcome: ShownOutcome) -> GroupLines:
    (first, row), (last, _) = rows[0], rows[-1]
    scores = [one.score for _, one in rows if one.score is not None]
    return GroupLines(
        first.offset,
        last.offset + len(last.text) - first.offset,
        row.step,
        outcome,
        len(rows),
        sum(scores) / len(scores) if scores else float("nan"),
    )


def _dumped_response(line: bytes, row: _DumpRow) -> SampledResponse:
    extras = {
        name: float(value)
        for name, value in _decode_any(line).items()
        if name not in _OWN_COLUMNS and isinstance(value, int | float)
    }
    return SampledResponse(
        row.output, 0, "", score=row.score, reward=row.reward, metrics=dict(extras)
    )


def _key(row: _DumpRow) -> tuple[str, str]:
    return ("uid", row.uid) if row.uid is not None else ("input", row.input)


def _group(text: bytes) -> SampledGroup | None:
    try:
        return _decode_group(text)
    except msgspec.DecodeError:
        return None


def _row(text: bytes) -> _DumpRow | None:
    try:
        return _decode_row(text)
    except msgspec.DecodeError:
        return None
