"""A rollout replica whose engine hangs in a step as long as a file exists; its process lives on.

Run as ``python -m tests.support.gated_replica``, with the file's name in `GATE_VARIABLE`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from services.rollout import __main__ as replica
from services.rollout.engines.embedded.loop import GenerationLoop
from sluice.concurrency.process import run_and_exit

GATE_VARIABLE = "SLUICE_TEST_GATE"
# A step takes so long that who looks finds the replica at work, also in a run of few samples.
_POLL_S, _STEP_S = 0.02, 0.04


def hang_while(gate: Path) -> None:
    """Makes every step of the engine wait until `gate` is gone."""
    step = GenerationLoop.step

    def gated(loop: GenerationLoop) -> None:
        while gate.exists():
            time.sleep(_POLL_S)
        time.sleep(_STEP_S)
        step(loop)

    GenerationLoop.step = gated  # type: ignore[method-assign, assignment]


def main() -> None:
    """Runs a replica with a gate."""
    hang_while(Path(os.environ[GATE_VARIABLE]))
    replica.main()


if __name__ == "__main__":
    run_and_exit(main)
