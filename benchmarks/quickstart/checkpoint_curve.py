"""Measure the held-out accuracy of every checkpoint of a finished run, over seconds of training.

The run itself does not validate, so its clock holds training only; the checkpoints are measured
afterwards by the code that measures the TRL baseline::

    python -m benchmarks.quickstart.checkpoint_curve --run-dir runs/bench/seed-0 --seed 0

The last line printed is one JSON object: `curve`, a list of [batch, seconds, accuracy].
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.quickstart.trl_job import HeldOut, load_rows
from sluice.report.run_record import read_run
from tools.phases import tool_parser


def main(arguments: Sequence[str]) -> int:
    """Measure every checkpoint; return the exit status."""
    parser = tool_parser(
        __doc__,
        "python -m benchmarks.quickstart.checkpoint_curve --run-dir runs/bench/seed-0 --seed 0",
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    curve = list(measure(parsed.run_dir, parsed.seed))
    sys.stdout.write(json.dumps({"curve": curve}) + "\n")
    return 0


def measure(run_dir: Path, seed: int) -> Iterator[tuple[int, float, float]]:
    """Yield (batch, seconds of training until then, accuracy) of start and checkpoints."""
    assets = run_dir / "assets"
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    held_out = HeldOut(load_rows(assets / "data" / "test.parquet", tokenizer), tokenizer)
    # Seconds from the first step's begin to the end of step k, at index k, with waits.
    steps = (row.get("timing_s/step") or 0.0 for row in read_run(run_dir).steps)
    seconds = list(accumulate(steps, initial=0.0))
    prefix = "global_step_"
    saved = (run_dir / "checkpoints").glob(f"{prefix}*/actor/huggingface")
    folders = sorted((int(f.parents[1].name.removeprefix(prefix)), f) for f in saved)
    for batch, folder in [(0, assets / "model"), *folders]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        yield batch, seconds[batch], held_out.accuracy(model, seed=seed * 10_000 + batch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
