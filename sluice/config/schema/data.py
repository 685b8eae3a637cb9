"""`data.*`: which prompts to train and validate on."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

FileList = str | list[str]


class DataConfig(Section, frozen=True):
    """Data sets in verl's parquet row format, and the batch size."""

    train_files: FileList | None = None
    """Training parquet file or files, read in order; none: only client prompts are trained on."""

    val_files: FileList | None = None
    """Validation parquet file or files; none: no validation."""

    prompt_key: str = "prompt"
    """Column with the list of chat messages."""

    reward_fn_key: str = "data_source"
    """Column that routes a row to its scorer and groups validation metrics."""

    max_prompt_length: PositiveInt = 512
    """Longest prompt, tokens."""

    max_response_length: PositiveInt = 512
    """Longest response, tokens."""

    train_batch_size: PositiveInt = 1024
    """Prompts (groups) in one train batch; rows are this times rollout.n."""

    gen_batch_size: PositiveInt | None = None
    """sampling strategy rounds: prompts of a wave; none: train_batch_size."""

    shuffle: bool = True
    """Shuffle the training set again in every epoch."""

    seed: int | None = None
    """Seed of the shuffle; none: 0."""

    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What to do with a prompt over max_prompt_length; error: it is dropped with a warning, never
    trained.
    """

    filter_overlong_prompts: bool = False
    """Leave prompts over max_prompt_length out, whatever truncation is."""

    validation_shuffle: bool = False
    """Shuffle the validation set."""

    apply_chat_template_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Further arguments of the chat template (enable_thinking and the like)."""

    trust_remote_code: bool = False
    """Run tokenizer code that ships with the checkpoint."""

    image_key: str = "images"
    """Column with a row's list of images."""

    image_patch_size: PositiveInt = 14
    """Images are resized to multiples of this, pixels."""

    mm_processor_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Further arguments of the image processor."""

    train_max_samples: int = -1
    """Use at most this many training rows; -1: all."""

    val_max_samples: int = -1
    """Use at most this many validation rows; -1: all."""

    deduplicate: bool = False
    """Issue rows with the same messages and ground truth only once."""

    shuffle_buffer_rows: NonNegativeInt = 16384
    """Row groups are read in random order and rows shuffled within a buffer of this many rows
    (memory bound of streaming).
    """
