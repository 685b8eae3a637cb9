"""Prove and measure the trainer on the CPU; `make bench-trainer`.

Parts, and the keys of the JSON object that is printed last; those of other parts are null:

parity      parity_worst, parity_cases, parity_layouts: gradients of real gloo ranks in every
            layout, the largest error relative to a gradient's own maximum, against transformers
            on one rank, float32;
            forward_equal: passes without gradients give the logprobs of those with, to the bit;
            loss_worst: three steps of DAPO or PPO in each layout, against one rank's losses
plans       plans: every published launch by name: fits, peak_gib, seconds
plan-error  plan_error_worst: bytes of a plan against real ranks
learning    loop_points: held-out accuracy of the quickstart on four ranks, two stages of two
            tensor indices, against one rank, in points; loop_gain: what the worse one learns
time-line   bubble: share of a pipeline's time in which its stages wait, by micro-batches;
            bubble_error_worst: its largest difference from the formula
states      read_share_worst: bytes that a rank reads at its start over those of its shards;
            async_block_share: seconds that an asynchronous save blocks training over all of it;
            beside_buckets_worst: buckets beside a rank's shards and snapshots while it freezes
            its weights;
            checkpoint_equal: weights and moments that other layouts load
head        head_memory_ratio: peak of the head in blocks over that of all logits
loop        learner_vs_hf: tokens/s over those of a plain transformers loop with padding
agreement   bf16_distance_ratio, bf16_drift_ratio: with --vllm-python only

missed names the keys that miss their bars; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.parts import Part, parts_parser, run_parts
from benchmarks.quickstart.parallel import MAX_POINTS, MIN_GAIN, train_both
from benchmarks.reporting import ROOT, last_json, print_line
from benchmarks.trainer import parity, time_line
from benchmarks.trainer.head import head
from benchmarks.trainer.plain_loop import learner_against_loop
from benchmarks.trainer.plans import NO_OFFLOAD, plan_errors, plans
from benchmarks.trainer.states import states

MAX_PLAN_S = 60.0


class _Plans(Part):
    """Every published launch has to fit, with its offload, and each to be planned in time."""

    def missed(self, report: Mapping[str, Any]) -> list[str]:
        """Return the key if one does not."""
        found = report["plans"]
        each = found.items() if isinstance(found, Mapping) else ()
        return ["plans"] * any(
            one["seconds"] > MAX_PLAN_S or not (one["fits"] or name.endswith(NO_OFFLOAD))
            for name, one in each
        )


def _learning(parsed: argparse.Namespace) -> Mapping[str, Any]:
    steps = [f"trainer.total_training_steps={parsed.steps}", f"trainer.test_freq={parsed.steps}"]
    found = train_both("stages", ROOT / "runs" / "layouts", seed=0, overrides=steps)
    print_line(f"learning: {found}")
    return {"loop_points": found["difference_points"], "loop_gain": found["gain"]}


def _agreement(parsed: argparse.Namespace) -> Mapping[str, Any]:
    command = ("-m", "benchmarks.trainer.agreement", "--vllm-python", parsed.vllm_python)
    return last_json([sys.executable, *command])


PARTS: Mapping[str, Part] = {
    "parity": Part(
        lambda _: parity.parity(),
        most={"parity_worst": 1e-5, "loss_worst": 1e-5},
        least={"parity_layouts": 25, "forward_equal": True},
        further=("parity_cases",),
    ),
    "plans": _Plans(lambda _: plans(), further=("plans",)),
    "plan-error": Part(lambda _: plan_errors(), most={"plan_error_worst": 0.05}),
    "learning": Part(_learning, most={"loop_points": MAX_POINTS}, least={"loop_gain": MIN_GAIN}),
    "time-line": Part(
        lambda _: time_line.time_lines(), most={"bubble_error_worst": 0.05}, further=("bubble",)
    ),
    "states": Part(
        lambda _: states(),
        most={"read_share_worst": 1.05, "async_block_share": 0.3, "beside_buckets_worst": 2.0},
        least={"checkpoint_equal": True},
    ),
    "head": Part(lambda _: head(), most={"head_memory_ratio": 0.2}),
    "loop": Part(lambda _: learner_against_loop(), least={"learner_vs_hf": 1.5}),
    "agreement": Part(
        _agreement,
        most={"bf16_distance_ratio": 1.1, "bf16_drift_ratio": 1.2},
        needs="vllm_python",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = parts_parser(__doc__, "python -m benchmarks.trainer --parts parity,plans", PARTS)
    parser.add_argument("--steps", type=int, default=12, help="of each run of the part learning")
    torch.set_num_threads(1)
    return run_parts(parser.parse_args(arguments), PARTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
