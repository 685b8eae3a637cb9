"""The time line of a pipeline of four gloo ranks: its measured bubble against the formula's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reporting import print_line
from benchmarks.trainer.stage_peer import StageAsked, TimedPass
from tests.support.tiny_policy import save_model
from tests.support.trainer_ranks import ranks_of

STAGES = 4
COUNTS = (4, 8, 16)
"""Micro-batches of a mini-batch."""
_FORWARD_S, _BACKWARD_S = 0.1, 0.2


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
    """Return the figures; print the rows of the table in docs/parallelism.md."""
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
        print_line(f"| {line.micro_batches} | {line.bubble:.1%} | {line.formula:.1%} |")
    return {
        "bubble": {str(line.micro_batches): round(line.bubble, 4) for line in lines},
        "bubble_error_worst": round(max(abs(line.bubble - line.formula) for line in lines), 4),
    }
