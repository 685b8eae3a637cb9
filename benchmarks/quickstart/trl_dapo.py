"""Baseline of `make bench-quickstart`: the quickstart's job under TRL's GRPOTrainer.

Run it in the environment that `benchmarks.quickstart` makes::

    VENV/bin/python -m benchmarks.quickstart.trl_dapo --assets DIR --seed 0 --target 0.88

By default it becomes two data-parallel ranks of one thread each, TRL's fastest way on two cores.
The clock covers `Trainer.train` without the evaluations; loading and the first evaluation come
before it. The last line printed is the result as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks.quickstart.trl_job import (
    JOB,
    HeldOut,
    dapo_reward,
    load_rows,
    rank_and_size,
)
from benchmarks.reporting import print_line

Point = tuple[int, float, float]
_MAX_BATCHES = 60
_SETTINGS = Path(__file__).with_name("trl.yaml")


class EvaluateAndStop(TrainerCallback):
    """Keeps the clock, measures accuracy every few batches, and ends the run at its bounds.

    Args:
        options: of the command line.
        accuracy: of a model after a batch.

    Attributes:
        curve: batch, seconds of training, accuracy of each measurement.
        stopped_by: ``target`` or ``max_batches``.
    """

    def __init__(self, options: argparse.Namespace, accuracy: Callable[[Any, int], float]) -> None:
        self._options, self._accuracy = options, accuracy
        self.curve: list[Point] = []
        self.stopped_by, self.batches, self.seconds = "", 0, 0.0
        self._began_s = 0.0

    # Parameters have the names of the overridden methods, which are called by keyword.
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Start the clock: everything before is set-up."""
        del args, state, control, kwargs
        self._began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Measure accuracy and check bounds after a batch's last optimizer step."""
        del args
        self.batches, left = divmod(state.global_step, JOB.steps_per_batch)
        if left:
            return
        # Ranks have the same batches and accuracies, so that all of them end after the same batch.
        self.seconds = time.perf_counter() - self._began_s
        is_last = self.batches >= _MAX_BATCHES
        if is_last or self.batches % self._options.evaluate_every == 0:
            self.measure(kwargs["model"])
            self._began_s = time.perf_counter() - self.seconds
        if self.curve[-1][2] >= self._options.target:
            self.stopped_by = "target"
        elif is_last:
            self.stopped_by = "max_batches"
        control.should_training_stop = bool(self.stopped_by)

    def measure(self, model: Any) -> None:  # noqa: ANN401
        """Add a measurement to the curve."""
        accuracy = self._accuracy(model, self.batches)
        self.curve.append((self.batches, round(self.seconds, 3), round(accuracy, 4)))
        if rank_and_size()[0] == 0:
            print_line(f"batch {self.batches:3d}  {self.seconds:7.1f} s  accuracy {accuracy:.3f}")


def train(options: argparse.Namespace) -> EvaluateAndStop:
    """Train until a bound; return what was measured."""
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        # The configuration comes first: it joins the ranks.
        config = _config(options, scratch)
        tokenizer = AutoTokenizer.from_pretrained(options.assets / "model")
        data = options.assets / "data"
        held_out = HeldOut(load_rows(data / "test.parquet", tokenizer), tokenizer)
        measured = EvaluateAndStop(
            options, lambda model, batch: held_out.accuracy(model, options.seed * 10_000 + batch)
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                options.assets / "model", dtype=torch.float32, attn_implementation="sdpa"
            ),
            reward_funcs=dapo_reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(load_rows(data / "train.parquet", tokenizer)),
            processing_class=tokenizer,
            callbacks=[measured],
        )
        trainer.remove_callback(PrinterCallback)
        measured.measure(trainer.model)
        trainer.train()
    return measured


def _config(options: argparse.Namespace, scratch: str) -> GRPOConfig:
    """Return TRL's configuration: one generation feeds `steps_per_batch` optimizer steps."""
    step_completions = JOB.batch_completions // JOB.steps_per_batch
    return GRPOConfig(
        **yaml.safe_load(_SETTINGS.read_text(encoding="utf-8")),
        output_dir=scratch,
        seed=options.seed,
        max_steps=_MAX_BATCHES * JOB.steps_per_batch,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=step_completions // (options.micro_batch * options.processes),
        generation_batch_size=JOB.batch_completions,
        num_generations=JOB.group_size,
        max_completion_length=JOB.max_response_tokens,
        epsilon=JOB.clip_low,
        epsilon_high=JOB.clip_high,
        learning_rate=JOB.learning_rate,
        lr_scheduler_kwargs={
            "num_stable_steps": 0,
            "num_decay_steps": JOB.schedule_batches * JOB.steps_per_batch,
            "decay_type": "linear",
            "min_lr_ratio": JOB.min_lr_ratio,
        },
        adam_beta1=JOB.adam_betas[0],
        adam_beta2=JOB.adam_betas[1],
        ddp_backend="gloo" if options.processes > 1 else None,
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--assets", type=Path, required=True, help="the quickstart's directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.88, help="accuracy that ends the run")
    parser.add_argument("--evaluate-every", type=int, default=5, help="in batches")
    # These change the speed and not the result; the defaults are the fastest on two cores.
    parser.add_argument("--processes", type=int, default=2, help="data-parallel ranks")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--micro-batch", type=int, default=128, help="completions of a rank")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    if options.processes > 1 and "LOCAL_RANK" not in os.environ:
        # The launcher replaces this process, so that ending this process ends the ranks.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.processes), "-m"]
        command += ["benchmarks.quickstart.trl_dapo", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        os.execve(sys.executable, command, environment)  # noqa: S606
    found = train(options)
    reached = (seconds for _, seconds, accuracy in found.curve if accuracy >= options.target)
    result = {
        "seconds_to_target": next(reached, None),
        "seconds_training": round(found.seconds, 3),
        "seconds_per_batch": round(found.seconds / max(1, found.batches), 4),
        "stopped_by": found.stopped_by,
        "curve": found.curve,
    }
    if rank_and_size()[0] == 0:
        print_line(json.dumps(result))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Gloo's threads, left over by the ranks' group, can abort an interpreter that ends in order.
    os._exit(status)
