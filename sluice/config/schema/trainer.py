"""`trainer.*`: length of the run, checkpoints, validation, loggers."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class TrainerConfig(Section, frozen=True):
    """Length of the run, checkpoints, validation and loggers."""

    total_epochs: PositiveInt = 30
    """Number of passes over the training set, counted by issued prompts."""

    total_training_steps: PositiveInt | None = None
    """Number of train batches; none: rows / train_batch_size * total_epochs."""

    project_name: str = "sluice"
    """Project name for the loggers."""

    experiment_name: str = "default"
    """Name of the run for the loggers."""

    logger: list[LoggerName] = msgspec.field(default_factory=lambda: ["console", "jsonl"])
    """Destinations of the metrics; without console the log has a short line for each step."""

    default_local_dir: str | None = None
    """Folder of the checkpoints; none: <run_dir>/checkpoints."""

    save_freq: int = -1
    """Save a checkpoint every this many steps and after the last; 0 or less: never."""

    test_freq: int = -1
    """Validate every this many steps and after the last; 0 or less: never."""

    val_before_train: bool = True
    """Validate before the first step."""

    val_only: bool = False
    """Validate once and exit, without training; requires val_before_train."""

    log_val_generations: NonNegativeInt = 0
    """Number of validation samples, each of another prompt, that are logged with their scores;
    0: none.
    """

    rollout_data_dir: str | None = None
    """Folder for the samples of every train batch, <step>.jsonl; none: not written."""

    validation_data_dir: str | None = None
    """Folder for the samples of every validation, <step>.jsonl; none: not written."""

    critic_warmup: NonNegativeInt = 0
    """First step that updates the policy; earlier steps update only the critic."""

    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: resume from the newest checkpoint, if there is one; disable: start from the model;
    resume_path: resume from resume_from_path.
    """

    resume_from_path: str | None = None
    """Checkpoint folder (global_step_N) for resume_mode=resume_path."""

    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Number of checkpoints to keep; older ones are deleted; none: keep all."""

    max_critic_ckpt_to_keep: PositiveInt | None = None
    """The same for the critic: a checkpoint stays whole while either number keeps it; none: as
    max_actor_ckpt_to_keep.
    """

    nnodes: PositiveInt = 1
    """Number of machines of the trainer."""

    n_gpus_per_node: PositiveInt = 1
    """Trainer ranks per machine, one per device (on CPUs: processes)."""

    device: str | None = None
    """cpu, cuda or npu; none: an accelerator if there is one, else the CPU."""

    seed: int = 0
    """Seed of all random numbers of the trainer."""
