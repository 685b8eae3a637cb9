"""Run the quickstart with trainer and replica on one GPU, which weights leave and enter by Gloo."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.reporting import print_report, quickstart

_ON_THE_GPU = (
    "trainer.device=cuda",
    "sluice.rollout.device=cuda",
    "sluice.rollout.replicas=1",
    "sluice.weights.backend=gloo",
    "trainer.logger=[jsonl]",
)


def main() -> int:
    """Train; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        return print_report(quickstart(Path(folder) / "run", 0, _ON_THE_GPU))


if __name__ == "__main__":
    sys.exit(main())
