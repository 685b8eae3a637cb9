"""Samples for reading: ``<folder>/<step>.jsonl``, an object a row, in verl's columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_OWN_COLUMNS = ("input", "output", "gts", "score", "step")


@dataclass(frozen=True, slots=True)
class DumpedSample:
    """One response.

    Args:
        input: the prompt's text.
        output: the response's text.
        gts: the ground truth.
        score: the row's score.
        extras: further columns, such as the scorer's; those named like verl's own are left out.
    """

    input: str
    output: str
    gts: object
    score: float
    extras: Mapping[str, object] = field(default_factory=dict)


def dump_text(samples: Iterable[DumpedSample], step: int) -> str:
    """The file's content. What is no number becomes null, what JSON lacks its text."""
    return "".join(_line(sample, step) + "\n" for sample in samples)


def write_dump(folder: Path, samples: Iterable[DumpedSample], step: int) -> Path:
    """Write ``<folder>/<step>.jsonl``, replacing it whole; the folder is made.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{step}.jsonl"
    partial = folder / f".{step}.jsonl.partial"
    partial.write_text(dump_text(samples, step), encoding="utf-8")
    return partial.replace(target)


def _line(sample: DumpedSample, step: int) -> str:
    own = (sample.input, sample.output, sample.gts, sample.score, step)
    row = {**sample.extras, **dict(zip(_OWN_COLUMNS, own, strict=True))}
    ordered = {name: row[name] for name in (*_OWN_COLUMNS, *sample.extras)}
    return json.dumps({n: _finite(v) for n, v in ordered.items()}, ensure_ascii=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
