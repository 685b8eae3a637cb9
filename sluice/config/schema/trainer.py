"""`trainer.*`: length of the run, checkpoints, validation, loggers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class TrainerConfig(Section, frozen=True):
    """The run."""

    total_epochs: Annotated[
        PositiveInt, Meta(description="Passes over the training set, counted in issued prompts.")
    ] = 30
    total_training_steps: Annotated[
        PositiveInt | None,
        Meta(description="Train batches; none: rows / train_batch_size * total_epochs."),
    ] = None
    project_name: Annotated[str, Meta(description="Name in the trainer's log.")] = "sluice"
    experiment_name: Annotated[str, Meta(description="Name in the trainer's log.")] = "default"
    logger: Annotated[list[LoggerName], Meta(description="Where metrics go.")] = msgspec.field(
        default_factory=lambda: ["console", "jsonl"]
    )
    default_local_dir: Annotated[
        str | None, Meta(description="Folder of the checkpoints; none: <run dir>/checkpoints.")
    ] = None
    save_freq: Annotated[
        int, Meta(description="Save every k steps and at the last; <= 0: never.")
    ] = -1
    test_freq: Annotated[
        int, Meta(description="Validate every k steps and at the last; <= 0: never.")
    ] = -1
    val_before_train: Annotated[bool, Meta(description="Validate the first weights.")] = True
    val_only: Annotated[
        bool, Meta(description="Validate the first weights and end; needs val_before_train.")
    ] = False
    log_val_generations: Annotated[
        NonNegativeInt, Meta(description="Validation samples shown with their scores; 0: none.")
    ] = 0
    rollout_data_dir: Annotated[
        str | None,
        Meta(description="Folder for every trained sample, <step>.jsonl; none: not written."),
    ] = None
    validation_data_dir: Annotated[
        str | None,
        Meta(description="Folder for every validation sample, <step>.jsonl; none: not written."),
    ] = None
    critic_warmup: Annotated[
        NonNegativeInt,
        Meta(description="Step from which the policy is updated; before it only the critic is."),
    ] = 0
    resume_mode: Annotated[
        Literal["auto", "disable", "resume_path"],
        Meta(description="Whether to resume from a checkpoint."),
    ] = "auto"
    resume_from_path: Annotated[
        str | None, Meta(description="Folder global_step_N for resume_path.")
    ] = None
    max_actor_ckpt_to_keep: Annotated[
        PositiveInt | None, Meta(description="Older checkpoints are deleted; none: keep all.")
    ] = None
    max_critic_ckpt_to_keep: Annotated[
        PositiveInt | None, Meta(description="The same for the critic's part of checkpoints.")
    ] = None
    nnodes: Annotated[PositiveInt, Meta(description="Machines of the trainer.")] = 1
    n_gpus_per_node: Annotated[
        PositiveInt, Meta(description="Trainer ranks per machine (processes on CPU).")
    ] = 1
    device: Annotated[str | None, Meta(description="cpu, cuda or npu; none: what is there.")] = None
    seed: Annotated[int, Meta(description="Seed of everything random in the trainer.")] = 0
