"""Measure the held-out accuracy of every checkpoint of a finished run, over seconds of training.

The run itself does not validate, so its clock holds training only; the checkpoints are measured
afterwards by the code that measures the TRL baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.quickstart.trl_job import HeldOut, load_rows
from sluice.report.run_record import read_progress


def checkpoint_curve(run_dir: Path, seed: int) -> Iterator[tuple[int, float, float]]:
    """Yield (batch, seconds of training until then, accuracy) of start and checkpoints."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    assets = run_dir / "assets"
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    held_out = HeldOut(load_rows(assets / "data" / "test.parquet", tokenizer), tokenizer)
    # Seconds from the first step's begin to the end of step k, at index k, with waits.
    steps = (row.get("timing_s/step") or 0.0 for row in read_progress(run_dir).steps)
    seconds = list(accumulate(steps, initial=0.0))
    prefix = "global_step_"
    saved = (run_dir / "checkpoints").glob(f"{prefix}*/actor/huggingface")
    folders = sorted((int(f.parents[1].name.removeprefix(prefix)), f) for f in saved)
    for batch, folder in [(0, assets / "model"), *folders]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        yield batch, seconds[batch], held_out.accuracy(model, seed=seed * 10_000 + batch)
