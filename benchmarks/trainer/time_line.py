"""The time line of a pipeline of four gloo ranks: its measured bubble against the formula's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reporting import print_line
from benchmarks.trainer.layout_page import IMAGES, replace_block
from benchmarks.trainer.stage_peer import StageAsked, TimedPass
from tests.support.tiny_policy import save_model
from tests.support.trainer_ranks import ranks_of

STAGES, PICTURED = 4, 8
COUNTS = (4, PICTURED, 16)
"""Micro-batches of a mini-batch; the picture is of `PICTURED`."""
_FORWARD_S, _BACKWARD_S = 0.1, 0.2
_PICTURE = IMAGES / "pipeline-time-line.svg"
_LEFT, _TOP, _WIDTH, _ROW, _BOX = 64, 34, 720, 34, 28
_FORWARD, _BACKWARD = "#1f6feb", "#d9480f"


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The passes of all stages over one mini-batch, by stage."""

    micro_batches: int
    stages: Sequence[Sequence[TimedPass]]

    @property
    def began_s(self) -> float:
        """Return when the first pass began, by the machine's monotonic clock."""
        return min(one.began_s for passes in self.stages for one in passes)

    @property
    def seconds(self) -> float:
        """Return the seconds until the last pass ended."""
        return max(one.ended_s for passes in self.stages for one in passes) - self.began_s

    @property
    def bubble(self) -> float:
        """Return the share of the time of all stages in which they wait."""
        busy_s = sum(one.ended_s - one.began_s for passes in self.stages for one in passes)
        return 1 - busy_s / (len(self.stages) * self.seconds)

    @property
    def formula(self) -> float:
        """Return the share for passes of equal length that take no time to travel."""
        waits = len(self.stages) - 1
        return waits / (self.micro_batches + waits)


def time_lines() -> dict[str, Any]:
    """Return the figures, and the lines under ``lines``."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), "llama", num_hidden_layers=STAGES)
        asked = StageAsked(str(model), _FORWARD_S, _BACKWARD_S, COUNTS)
        with ranks_of("benchmarks.trainer.stage_peer", STAGES, msgspec.to_builtins(asked)) as ranks:
            lines = [
                TimeLine(
                    count,
                    [msgspec.convert(rank.answer(), list[TimedPass]) for rank in ranks],
                )
                for count in COUNTS
            ]
    for line in lines:
        print_line(
            f"{STAGES} stages, {line.micro_batches} micro-batches: {line.bubble:.3f} of the time "
            f"waits, {line.formula:.3f} by the formula"
        )
    return {
        "bubble": {str(line.micro_batches): round(line.bubble, 4) for line in lines},
        "bubble_error_worst": round(max(abs(line.bubble - line.formula) for line in lines), 4),
        "lines": lines,
    }


def write_time_lines(lines: Sequence[TimeLine]) -> None:
    """Replace the figures of docs/parallelism.md, and the picture."""
    table = ["| micro-batches | waits, measured | by the formula |", "|---|---|---|"]
    table += [
        f"| {line.micro_batches} | {line.bubble:.1%} | {line.formula:.1%} |" for line in lines
    ]
    replace_block("bubble", table)
    pictured = next(line for line in lines if line.micro_batches == PICTURED)
    _PICTURE.write_text(picture(pictured), encoding="utf-8")


def picture(line: TimeLine) -> str:
    """Return a time line as SVG: a row for each stage, a box for each pass."""
    scale = _WIDTH / line.seconds
    bottom = _TOP + _ROW * len(line.stages)
    parts = [
        _text(
            _LEFT,
            20,
            f"{len(line.stages)} stages, {line.micro_batches} micro-batches:"
            f" {line.bubble:.1%} of the time waits, {line.formula:.1%} by the formula",
        ),
    ]
    for number, passes in enumerate(line.stages):
        top = _TOP + _ROW * number
        parts.append(_text(_LEFT - 8, top + 19, f"stage {number + 1}", "end"))
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_BOX}" fill="#eee"/>')
        for one in passes:
            left = _LEFT + scale * (one.began_s - line.began_s)
            width = scale * (one.ended_s - one.began_s)
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BOX}" '
                f'fill="{_BACKWARD if one.is_backward else _FORWARD}" stroke="#fff"/>'
            )
            label = _text(left + width / 2, top + 19, str(one.micro_batch + 1), "middle", "#fff")
            parts.append(label)
    for tenth in range(6):
        x = _LEFT + _WIDTH * tenth / 5
        parts.append(_text(x, bottom + 14, f"{line.seconds * tenth / 5:.1f} s", "middle"))
    for x, fill, name in ((_LEFT, _FORWARD, "forward"), (_LEFT + 90, _BACKWARD, "backward")):
        parts.append(f'<rect x="{x}" y="{bottom + 26}" width="12" height="12" fill="{fill}"/>')
        parts.append(_text(x + 18, bottom + 36, name))
    width, height = _LEFT + _WIDTH + 24, bottom + 48
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
