"""Prove and measure the trainer on the CPU; `make bench-trainer`.

Parts, and the keys of the JSON object that is printed last; those of other parts are null:

parity      parity_worst, parity_cases: gradients of real gloo ranks in every layout, the largest
            error relative to a gradient's own maximum, against transformers on one rank, float32;
            dapo_loss_worst: three steps of DAPO in each layout, against one rank's losses
plans       plans: every published launch by name: fits, peak_gib, seconds
plan-error  plan_error_worst: bytes of a plan against real ranks
states      read_share_worst: bytes that a rank reads at its start over those of its shards;
            async_block_share: seconds that an asynchronous save blocks training over all of it;
            beside_buckets_worst: buckets beside a rank's shards while weights are streamed;
            checkpoint_equal: weights and moments that other layouts load
head        head_memory_ratio: peak of the head in blocks over that of all logits
loop        learner_vs_hf: tokens/s over those of a plain transformers loop with padding
step        quickstart_step_ratio: a step's time over that of an earlier commit
agreement   bf16_distance_ratio, bf16_drift_ratio: with --vllm-python only

missed names the keys that miss their bars; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.reporting import last_json, print_line, print_report
from benchmarks.trainer import parity
from benchmarks.trainer.head import head
from benchmarks.trainer.plain_loop import learner_against_loop
from benchmarks.trainer.plans import plan_errors, plans
from benchmarks.trainer.states import states
from benchmarks.trainer.step_time import BEFORE, step_ratio
from tools.phases import tool_parser

KEYS = (
    *("parity_worst", "parity_cases", "dapo_loss_worst", "plans", "plan_error_worst"),
    *("read_share_worst", "checkpoint_equal", "async_block_share", "beside_buckets_worst"),
    *("head_memory_ratio", "learner_vs_hf", "quickstart_step_ratio"),
    *("bf16_distance_ratio", "bf16_drift_ratio"),
)

MOST: Mapping[str, float] = {
    "parity_worst": 1e-5,
    "dapo_loss_worst": 1e-5,
    "plan_error_worst": 0.05,
    "read_share_worst": 1.05,
    "async_block_share": 0.3,
    "beside_buckets_worst": 2.0,
    "head_memory_ratio": 0.2,
    "quickstart_step_ratio": 1.0,
    "bf16_distance_ratio": 1.1,
    "bf16_drift_ratio": 1.2,
}
LEAST: Mapping[str, float] = {"learner_vs_hf": 1.5}
MOST_PLAN_S = 60.0

Part = Callable[[argparse.Namespace], Mapping[str, Any]]


def _parity(parsed: argparse.Namespace) -> Mapping[str, Any]:
    found = parity.parity()
    if parsed.write_docs:
        parity.write_table(found["rows"])
    return found


def _agreement(parsed: argparse.Namespace) -> Mapping[str, Any]:
    if parsed.vllm_python is None:
        print_line("agreement: left out, there is no --vllm-python")
        return {}
    command = ("-m", "benchmarks.trainer.agreement", "--vllm-python", parsed.vllm_python)
    return last_json([sys.executable, *command])


PARTS: Mapping[str, Part] = {
    "parity": _parity,
    "plans": lambda _: plans(),
    "plan-error": lambda _: plan_errors(),
    "states": lambda _: states(),
    "head": lambda _: head(),
    "loop": lambda _: learner_against_loop(),
    "step": lambda parsed: step_ratio(parsed.before),
    "agreement": _agreement,
}


def missed(report: Mapping[str, Any]) -> list[str]:
    """Return the keys whose figures miss their bars; a key without a figure misses none."""
    found = {key: value for key, value in report.items() if value is not None}
    # "not <=" and not ">", so that nan misses every bar.
    keys = [key for key, bar in MOST.items() if key in found and not found[key] <= bar]
    keys += [key for key, bar in LEAST.items() if key in found and not found[key] >= bar]
    keys += ["checkpoint_equal"] * (found.get("checkpoint_equal") is False)
    each = found.get("plans", {}).values()
    keys += ["plans"] * any(not one["fits"] or one["seconds"] > MOST_PLAN_S for one in each)
    return keys


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: give some of {','.join(PARTS)}")
    return names


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.trainer --parts parity,plans")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--before", default=BEFORE, help="commit that the step is compared with")
    parser.add_argument("--vllm-python", help="of an environment with vLLM and sluice")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the parity table into docs/parallelism.md"
    )
    parsed = parser.parse_args(arguments)
    # Before the first rank starts, which inherits them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    torch.set_num_threads(1)
    report: dict[str, Any] = dict.fromkeys(KEYS)
    for name in parsed.parts:
        began_s = time.monotonic()
        found = PARTS[name](parsed)
        report |= {key: value for key, value in found.items() if key in KEYS}
        print_line(f"{name}: {time.monotonic() - began_s:.0f} s")
    report["missed"] = missed(report)
    print_report(report)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
