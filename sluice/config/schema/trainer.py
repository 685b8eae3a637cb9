"""`trainer.*`: length of the run, checkpoints, validation, loggers."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class TrainerConfig(Section, frozen=True):
    """The run."""

    total_epochs: PositiveInt = 30
    """Passes over the training set, counted in issued prompts."""

    total_training_steps: PositiveInt | None = None
    """Train batches; none: rows / train_batch_size * total_epochs."""

    project_name: str = "sluice"
    """Name in the trainer's log."""

    experiment_name: str = "default"
    """Name in the trainer's log."""

    logger: list[LoggerName] = msgspec.field(default_factory=lambda: ["console", "jsonl"])
    """Where metrics go."""

    default_local_dir: str | None = None
    """Folder of the checkpoints; none: <run dir>/checkpoints."""

    save_freq: int = -1
    """Save every k steps and at the last; <= 0: never."""

    test_freq: int = -1
    """Validate every k steps and at the last; <= 0: never."""

    val_before_train: bool = True
    """Validate the first weights."""

    val_only: bool = False
    """Validate the first weights and end; needs val_before_train."""

    log_val_generations: NonNegativeInt = 0
    """Validation samples shown with their scores; 0: none."""

    rollout_data_dir: str | None = None
    """Folder for every trained sample, <step>.jsonl; none: not written."""

    validation_data_dir: str | None = None
    """Folder for every validation sample, <step>.jsonl; none: not written."""

    critic_warmup: NonNegativeInt = 0
    """Step from which the policy is updated; before it only the critic is."""

    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Whether to resume from a checkpoint."""

    resume_from_path: str | None = None
    """Folder global_step_N for resume_path."""

    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Older checkpoints are deleted; none: keep all."""

    max_critic_ckpt_to_keep: PositiveInt | None = None
    """The same for the critic's part of checkpoints."""

    nnodes: PositiveInt = 1
    """Machines of the trainer."""

    n_gpus_per_node: PositiveInt = 1
    """Trainer ranks per machine (processes on CPU)."""

    device: str | None = None
    """cpu, cuda or npu; none: what is there."""

    seed: int = 0
    """Seed of everything random in the trainer."""
