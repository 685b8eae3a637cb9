"""Trains the quickstart job with TRL's GRPOTrainer. Runs in TRL's own environment."""

from __future__ import annotations

import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.training_record import AccuracyCurve, Bounds, StopReason, TrainingClock
from benchmarks.trl_settings import DapoJob, TrlTuning
from services.reward.scorers.math_dapo import compute_score
from sluice.algorithm.overlong import overlong_penalty

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "tokenizers", "torch")


@dataclass(frozen=True, slots=True)
class TrlOutcome:
    """What a run measured."""

    curve: AccuracyCurve
    stopped_by: StopReason | None
    batches: int
    generated_tokens: int
    training_seconds: float
    evaluation_seconds: float
    setup_seconds: float


class DapoReward:
    """The reward function TRL calls; counts the tokens it is shown."""

    __name__ = "math_dapo"

    def __init__(self, job: DapoJob) -> None:
        self._job = job
        self.num_tokens = 0

    def __call__(
        self,
        *,
        completions: list[str],
        completion_ids: list[list[int]],
        ground_truth: list[str],
        **_: object,
    ) -> list[float]:
        """Score of each completion, +1 or -1, plus the overlong penalty."""
        self.num_tokens += sum(map(len, completion_ids))
        return [
            compute_score(text, truth)["score"] + self._penalty(len(ids))
            for text, ids, truth in zip(completions, completion_ids, ground_truth, strict=True)
        ]

    def _penalty(self, num_tokens: int) -> float:
        return overlong_penalty(
            num_tokens,
            max_response_tokens=self._job.max_response_tokens,
            buffer_tokens=self._job.overlong_buffer_tokens,
            penalty_factor=self._job.overlong_penalty_factor,
        )


class HeldOut:
    """Accuracy on the held-out problems at the job's temperature."""

    def __init__(self, rows: Sequence[dict[str, str]], tokenizer: Any, job: DapoJob) -> None:
        self._truths = [row["ground_truth"] for row in rows]
        prompts = [row["prompt"] for row in rows]
        self._tokenizer = tokenizer
        self._inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        self._job = job

    @torch.no_grad()
    def accuracy(self, model: Any, seed: int) -> float:
        """Share of right answers; draws from its own random numbers and restores the mode."""
        was_training = model.training
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokens = model.generate(
                **self._inputs,
                do_sample=True,
                temperature=self._job.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self._job.max_response_tokens,
                num_return_sequences=self._job.samples_per_held_out,
            )
        model.train(was_training)
        responses = tokens[:, self._inputs["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        truths = [truth for truth in self._truths for _ in range(self._job.samples_per_held_out)]
        right = [
            compute_score(text, truth)["acc"] for text, truth in zip(texts, truths, strict=True)
        ]
        return sum(right) / len(right)


class EvaluateAndStop(TrainerCallback):
    """Keeps the clock, measures every `evaluate_every` batches and ends the run at its bounds."""

    def __init__(  # noqa: PLR0913 - each is one collaborator of the run
        self,
        *,
        job: DapoJob,
        bounds: Bounds,
        evaluate_every: int,
        measure: Callable[[Any], float],
        curve: AccuracyCurve,
        report: Callable[[str], None],
    ) -> None:
        self.clock = TrainingClock()
        self.stopped_by: StopReason | None = None
        self.batches = 0
        self._job = job
        self._bounds = bounds
        self._evaluate_every = evaluate_every
        self._measure = measure
        self._curve = curve
        self._report = report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock: everything before it is set-up."""
        del args, state, control, kwargs
        self.clock.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After the last optimizer step of a batch: progress line, accuracy, bounds."""
        del args
        if state.global_step % self._job.steps_per_batch:
            return
        self.batches = state.global_step // self._job.steps_per_batch
        seconds = self.clock.training_seconds
        if self._is_due(seconds):
            with self.clock.paused():
                self._curve.add(self.batches, seconds, self._measure(kwargs["model"]))
            self._report(
                f"batch {self.batches:3d}  train {seconds:7.1f} s"
                f"  accuracy {self._curve.points[-1].accuracy:.3f}"
            )
        newest = self._curve.points[-1].accuracy
        self.stopped_by = self._bounds.reason_to_stop(self.batches, seconds, newest)
        control.should_training_stop = self.stopped_by is not None

    def _is_due(self, seconds: float) -> bool:
        ends = self.batches >= self._bounds.max_batches or seconds >= self._bounds.max_seconds
        return ends or self.batches % self._evaluate_every == 0


def train(  # noqa: PLR0913 - the run's whole input
    *,
    assets: Path,
    job: DapoJob,
    tuning: TrlTuning,
    bounds: Bounds,
    evaluate_every: int,
    seed: int,
    report: Callable[[str], None],
) -> TrlOutcome:
    """Train until a bound; `report` receives progress lines."""
    began = time.perf_counter()
    torch.set_num_threads(tuning.threads)
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = AutoModelForCausalLM.from_pretrained(
        assets / "model", dtype=torch.float32, attn_implementation=tuning.attention
    )
    held_out = HeldOut(load_rows(assets / "data" / "test.parquet", tokenizer), tokenizer, job)
    reward = DapoReward(job)
    curve = AccuracyCurve()
    callback = EvaluateAndStop(
        job=job,
        bounds=bounds,
        evaluate_every=evaluate_every,
        measure=lambda policy: held_out.accuracy(policy, seed),
        curve=curve,
        report=report,
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=make_config(job, tuning, bounds, seed, scratch),
            train_dataset=datasets.Dataset.from_list(
                load_rows(assets / "data" / "train.parquet", tokenizer)
            ),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        setup_seconds = time.perf_counter() - began
        curve.add(0, 0.0, held_out.accuracy(model, seed))
        report(f"batch   0  train     0.0 s  accuracy {curve.points[0].accuracy:.3f}")
        trainer.train()
    return TrlOutcome(
        curve=curve,
        stopped_by=callback.stopped_by,
        batches=callback.batches,
        generated_tokens=reward.num_tokens,
        training_seconds=callback.clock.training_seconds,
        evaluation_seconds=callback.clock.evaluation_seconds,
        setup_seconds=setup_seconds,
    )


def load_rows(path: Path, tokenizer: Any) -> list[dict[str, str]]:
    """Prompts with the chat template applied, once here and not in every batch, and the truths."""
    table = pq.read_table(path, columns=["prompt", "reward_model"]).to_pylist()
    return [
        {
            "prompt": tokenizer.apply_chat_template(
                row["prompt"], tokenize=False, add_generation_prompt=True
            ),
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in table
    ]


def make_config(
    job: DapoJob, tuning: TrlTuning, bounds: Bounds, seed: int, scratch: str
) -> GRPOConfig:
    """TRL's configuration of the job: one generation feeds `steps_per_batch` optimizer steps."""
    schedule_steps = job.schedule_batches * job.steps_per_batch
    return GRPOConfig(
        output_dir=scratch,
        seed=seed,
        max_steps=bounds.max_batches * job.steps_per_batch,
        per_device_train_batch_size=tuning.micro_batch,
        gradient_accumulation_steps=job.step_completions // tuning.micro_batch,
        generation_batch_size=job.batch_completions,
        num_generations=job.group_size,
        max_completion_length=job.max_response_tokens,
        temperature=job.temperature,
        loss_type="dapo",
        beta=0.0,
        epsilon=job.clip_low,
        epsilon_high=job.clip_high,
        num_iterations=1,
        scale_rewards="group",
        mask_truncated_completions=False,
        learning_rate=job.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={
            "num_decay_steps": schedule_steps - job.warmup_steps,
            "decay_type": "linear",
            "min_lr_ratio": job.min_lr_ratio,
        },
        warmup_steps=job.warmup_steps,
        adam_beta1=job.adam_betas[0],
        adam_beta2=job.adam_betas[1],
        weight_decay=job.weight_decay,
        max_grad_norm=job.max_grad_norm,
        bf16=tuning.bf16,
        gradient_checkpointing=False,
        cache_implementation=tuning.cache or None,
        use_transformers_continuous_batching=tuning.continuous_batching,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def versions() -> dict[str, str]:
    """Versions of the packages that decide the result."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}
