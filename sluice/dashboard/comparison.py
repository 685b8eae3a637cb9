"""Responses to the same problems by the first and by the last validated policy version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.dashboard.sample_lines import DumpRow, dump_row

_FOLDER = "validation"
_NUM_PAIRS = 8
_MOST_BYTES = 4 << 20  # of a file; examples of a validation are far smaller


def compare_validations(run_dir: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Return ``before`` and ``after`` (steps), and ``pairs`` of responses to the same problem.

    Args:
        run_dir: the run's folder.
        steps: those with a validation, rising. Without two that recorded examples there are no
            pairs.
    """
    if len(steps) < 2:
        return {"before": None, "after": None, "pairs": []}
    before, after = (
        {example.input: example for example in _examples(run_dir / _FOLDER / f"{step}.jsonl")}
        for step in (steps[0], steps[-1])
    )
    shared = (prompt for prompt in before if prompt in after)
    pairs = [
        {
            "prompt": prompt,
            "ground_truth": "" if before[prompt].gts is None else str(before[prompt].gts),
            "before": _response(before[prompt]),
            "after": _response(after[prompt]),
        }
        for prompt in islice(shared, _NUM_PAIRS)
    ]
    return {"before": steps[0], "after": steps[-1], "pairs": pairs}


def _response(example: DumpRow) -> dict[str, Any]:
    return {"text": example.output, "score": example.score}


def _examples(file: Path) -> Iterator[DumpRow]:
    """Yield the rows at the beginning of a file; none if it cannot be read."""
    try:
        with file.open("rb") as opened:
            lines = opened.read(_MOST_BYTES).split(b"\n")[:-1]
    except OSError:
        return
    yield from filter(None, map(dump_row, lines))
