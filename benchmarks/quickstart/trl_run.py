"""Train the quickstart job with TRL's GRPOTrainer, in TRL's own environment."""

from __future__ import annotations

import importlib.metadata
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks.quickstart.training_record import AccuracyCurve, Bounds, StopReason
from benchmarks.quickstart.trl_evaluation import (
    EvaluateAndStop,
    HeldOut,
    load_rows,
    progress_line,
    sum_over_ranks,
)
from benchmarks.quickstart.trl_scoring import DapoReward
from benchmarks.quickstart.trl_settings import (
    LR_SCHEDULE,
    DapoJob,
    TrlTuning,
    lr_schedule_arguments,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "tokenizers", "torch")


@dataclass(frozen=True, slots=True)
class TrlOutcome:
    """What a run measured; tokens and CPU seconds are of all ranks."""

    curve: AccuracyCurve
    stopped_by: StopReason | None
    batches: int
    generated_tokens: int
    training_seconds: float
    cpu_seconds: float
    evaluation_seconds: float
    setup_seconds: float


@dataclass(frozen=True, slots=True)
class TrlRun:
    """One run: where the files are, what to train, how, until when."""

    assets: Path
    job: DapoJob
    tuning: TrlTuning
    bounds: Bounds
    evaluate_every: int
    seed: int


def train(run: TrlRun, report: Callable[[str], None]) -> TrlOutcome:
    """Train until a bound; `report` receives progress lines."""
    began = time.perf_counter()
    torch.set_num_threads(run.tuning.threads)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        # The configuration comes first: it joins the ranks.
        config = make_config(run, scratch)
        tokenizer = AutoTokenizer.from_pretrained(run.assets / "model")
        data = run.assets / "data"
        held_out = HeldOut(load_rows(data / "test.parquet", tokenizer), tokenizer, run.job)
        reward = DapoReward(run.job)
        curve = AccuracyCurve()

        def measure(model: PreTrainedModel, batch: int) -> float:
            return held_out.accuracy(model, seed=run.seed * 10_000 + batch)

        callback = EvaluateAndStop(
            job=run.job,
            bounds=run.bounds,
            evaluate_every=run.evaluate_every,
            measure=measure,
            curve=curve,
            report=report,
        )
        trainer = GRPOTrainer(
            model=load_model(run),
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(load_rows(data / "train.parquet", tokenizer)),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        setup_seconds = time.perf_counter() - began
        curve.add(0, 0.0, measure(trainer.model, 0))
        report(progress_line(*curve.points[0]))
        trainer.train()
    return TrlOutcome(
        curve=curve,
        stopped_by=callback.stopped_by,
        batches=callback.batches,
        generated_tokens=int(sum_over_ranks(reward.num_tokens)),
        training_seconds=callback.training_seconds,
        cpu_seconds=sum_over_ranks(callback.cpu_seconds),
        evaluation_seconds=callback.clock.evaluation_seconds,
        setup_seconds=setup_seconds,
    )


def load_model(run: TrlRun) -> PreTrainedModel:
    """Return the warm-started model in float32."""
    return AutoModelForCausalLM.from_pretrained(
        run.assets / "model", dtype=torch.float32, attn_implementation=run.tuning.attention
    )


def make_config(run: TrlRun, scratch: str) -> GRPOConfig:
    """Return TRL's configuration: one generation feeds `steps_per_batch` optimizer steps."""
    job, tuning = run.job, run.tuning
    return GRPOConfig(
        output_dir=scratch,
        seed=run.seed,
        max_steps=run.bounds.max_batches * job.steps_per_batch,
        per_device_train_batch_size=tuning.micro_batch,
        gradient_accumulation_steps=(
            job.step_completions // (tuning.micro_batch * tuning.processes)
        ),
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
        lr_scheduler_type=LR_SCHEDULE,
        lr_scheduler_kwargs=lr_schedule_arguments(job),
        warmup_steps=job.warmup_steps,
        adam_beta1=job.adam_betas[0],
        adam_beta2=job.adam_betas[1],
        weight_decay=job.weight_decay,
        max_grad_norm=job.max_grad_norm,
        bf16=tuning.bf16,
        activation_checkpointing=False,
        cache_implementation=tuning.cache or None,
        use_transformers_continuous_batching=tuning.continuous_batching,
        use_cpu=True,
        ddp_backend="gloo" if tuning.processes > 1 else None,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def versions() -> dict[str, str]:
    """Return versions of the packages that decide the result."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}
