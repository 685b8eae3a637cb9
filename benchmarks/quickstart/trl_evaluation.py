"""Held-out accuracy during a TRL run, and the callback that keeps the clock and ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.quickstart.training_record import AccuracyCurve, Bounds, StopReason, TrainingClock
from benchmarks.quickstart.trl_settings import DapoJob
from services.reward.grading.scorers.math_dapo import compute_score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's `value`; all ranks must call it."""
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def load_rows(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return prompts with the chat template applied (once, not in every batch), and the truths."""
    table = pq.read_table(path, columns=["prompt", "reward_model"]).to_pylist()
    return [
        {
            "prompt": str(
                tokenizer.apply_chat_template(
                    row["prompt"], tokenize=False, add_generation_prompt=True
                )
            ),
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in table
    ]


class HeldOut:
    """Accuracy on the held-out problems at the job's temperature; ranks share the problems.

    Args:
        rows: every problem's `prompt` (text) and `ground_truth`.
    """

    def __init__(
        self, rows: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, job: DapoJob
    ) -> None:
        rank, size = rank_and_size()
        self._num_samples = len(rows) * job.samples_per_held_out
        self._rows = rows[rank::size]
        self._tokenizer = tokenizer
        self._inputs = tokenizer(
            [row["prompt"] for row in self._rows],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        self._job = job

    def accuracy(self, model: Any, seed: int) -> float:  # noqa: ANN401 - typed without generate
        """Return the share of right answers over all ranks; leave global random numbers alone."""
        rank, size = rank_and_size()
        was_training = model.training
        model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed * size + rank)
            texts = self._sample(model)
        model.train(was_training)
        samples = self._job.samples_per_held_out
        truths = [row["ground_truth"] for row in self._rows for _ in range(samples)]
        right = sum(
            compute_score(text, truth)["acc"] for text, truth in zip(texts, truths, strict=True)
        )
        return sum_over_ranks(right) / self._num_samples

    def _sample(self, model: Any) -> list[str]:  # noqa: ANN401
        tokens = model.generate(
            **self._inputs,
            do_sample=True,
            temperature=self._job.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self._job.max_response_tokens,
            num_return_sequences=self._job.samples_per_held_out,
        )
        responses = tokens[:, self._inputs["input_ids"].shape[1] :]
        texts: list[str] = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        return texts


class EvaluateAndStop(TrainerCallback):
    """Keeps the clocks, measures every `evaluate_every` batches and ends the run at its bounds.

    Args:
        measure: held-out accuracy of a model after a batch.
        curve: holds the untrained accuracy; measurements are appended.
        report: receives progress lines.
    """

    def __init__(
        self,
        *,
        job: DapoJob,
        bounds: Bounds,
        evaluate_every: int,
        measure: Callable[[PreTrainedModel, int], float],
        curve: AccuracyCurve,
        report: Callable[[str], None],
    ) -> None:
        self.clock = TrainingClock()
        self.cpu_clock = TrainingClock(time.process_time)
        self.stopped_by: StopReason | None = None
        self.batches = 0
        self.training_seconds = 0.0
        self.cpu_seconds = 0.0
        self._job = job
        self._bounds = bounds
        self._evaluate_every = evaluate_every
        self._measure = measure
        self._curve = curve
        self._report = report

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - as the overridden method has it
    ) -> None:
        """Start the clocks: everything before is set-up."""
        del args, state, control, kwargs
        self.clock.start()
        self.cpu_clock.start()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - as the overridden method has it
    ) -> None:
        """Measure accuracy, print progress and check bounds after a batch's last optimizer step."""
        del args
        if state.global_step % self._job.steps_per_batch:
            return
        self.batches = state.global_step // self._job.steps_per_batch
        self.cpu_seconds = self.cpu_clock.training_seconds
        # One decision for all ranks: they would wait for each other for ever otherwise.
        self.training_seconds = sum_over_ranks(self.clock.training_seconds) / rank_and_size()[1]
        if self._is_due():
            with self.clock.paused(), self.cpu_clock.paused():
                accuracy = self._measure(kwargs["model"], self.batches)
            self._curve.add(self.batches, self.training_seconds, accuracy)
            self._report(progress_line(self.batches, self.training_seconds, accuracy))
        newest = self._curve.points[-1].accuracy
        self.stopped_by = self._bounds.reason_to_stop(self.batches, self.training_seconds, newest)
        control.should_training_stop = self.stopped_by is not None

    def _is_due(self) -> bool:
        ends = self._bounds.reason_to_stop(self.batches, self.training_seconds, accuracy=0.0)
        return ends is not None or self.batches % self._evaluate_every == 0


def progress_line(batch: int, seconds: float, accuracy: float) -> str:
    """Return one measurement for the console."""
    return f"batch {batch:3d}  trained {seconds:7.1f} s  accuracy {accuracy:.3f}"
