"""The quickstart's job, synchronous, as episodes of one answer against samples that are one answer:
the weights and moments of both after three steps, and their pace.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parts import Part
from benchmarks.reporting import alternate, empty_run_folder, print_line, quickstart
from sluice.report.run_record import read_progress
from tests.support.saved_states import are_equal

_ROUNDS, _STEPS, _COMPARED = 3, 6, 3
_ACTOR = f"checkpoints/global_step_{_COMPARED}/actor"
_WORLD = """
class OneAnswer:
    def reset(self, **row):
        pass

    def turn(self, answer: str) -> None:
        return None
"""
_SETTINGS = (
    f"trainer.total_training_steps={_STEPS}",
    f"trainer.save_freq={_COMPARED}",
    "trainer.max_actor_ckpt_to_keep=null",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    "sluice.asynchrony.max_staleness=0",
    "sluice.rollout.replicas=1",
)


def measure() -> Mapping[str, Any]:
    """Return the figures of rounds in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = folder / "one_answer.py"
        world.write_text(_WORLD, encoding="utf-8")
        kinds = {
            "plain": [*_SETTINGS],
            "episodes": [*_SETTINGS, f"sluice.environment.path={world}"],
        }

        def pace(kind: str) -> float:
            """Return trained tokens a second of all steps but the first."""
            run_dir = folder / kind
            empty_run_folder(run_dir, folder / "assets", "quickstart", 0)
            quickstart(run_dir, 0, kinds[kind])
            steps = read_progress(run_dir).steps[1:]
            seconds = sum(row["timing_s/step"] or 0.0 for row in steps)
            return sum(row["perf/total_num_tokens"] or 0.0 for row in steps) / seconds

        found = alternate({kind: partial(pace, kind) for kind in kinds}, _ROUNDS)
        print_line(f"tokens/s: {found}")
        ratios = [one / other for one, other in zip(found["episodes"], found["plain"], strict=True)]
        return {
            "single_turn_equal": float(are_equal(*(folder / kind / _ACTOR for kind in kinds))),
            "single_turn_ratio": median(ratios),
        }


PART = Part(lambda _: measure(), least={"single_turn_equal": 1.0, "single_turn_ratio": 0.97})
