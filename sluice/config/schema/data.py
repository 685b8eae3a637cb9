"""`data.*`: which prompts to train and validate on."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

FileList = str | list[str]


class DataConfig(Section, frozen=True):
    """Data sets in verl's parquet row format, and the batch size."""

    train_files: Annotated[
        FileList | None,
        Meta(
            description=(
                "Training parquet file or files, read in order; none: only client prompts are "
                "trained on."
            )
        ),
    ] = None
    val_files: Annotated[
        FileList | None, Meta(description="Validation parquet file or files; none: no validation.")
    ] = None
    prompt_key: Annotated[str, Meta(description="Column with the list of chat messages.")] = (
        "prompt"
    )
    reward_fn_key: Annotated[
        str,
        Meta(description="Column that routes a row to its scorer and groups validation metrics."),
    ] = "data_source"
    max_prompt_length: Annotated[PositiveInt, Meta(description="Longest prompt, tokens.")] = 512
    max_response_length: Annotated[PositiveInt, Meta(description="Longest response, tokens.")] = 512
    train_batch_size: Annotated[
        PositiveInt,
        Meta(description="Prompts (groups) in one train batch; rows are this times rollout.n."),
    ] = 1024
    gen_batch_size: Annotated[
        PositiveInt | None,
        Meta(description="sampling strategy rounds: prompts of a wave; none: train_batch_size."),
    ] = None
    shuffle: Annotated[bool, Meta(description="Shuffle the training set again in every epoch.")] = (
        True
    )
    seed: Annotated[int | None, Meta(description="Seed of the shuffle; none: 0.")] = None
    truncation: Annotated[
        Literal["error", "left", "right", "middle"],
        Meta(
            description=(
                "What to do with a prompt over max_prompt_length; error: it is dropped with a "
                "warning, never trained."
            )
        ),
    ] = "error"
    filter_overlong_prompts: Annotated[
        bool,
        Meta(description="Leave prompts over max_prompt_length out, whatever truncation is."),
    ] = False
    validation_shuffle: Annotated[bool, Meta(description="Shuffle the validation set.")] = False
    apply_chat_template_kwargs: Annotated[
        dict[str, object],
        Meta(description="Further arguments of the chat template (enable_thinking and the like)."),
    ] = msgspec.field(default_factory=dict)
    trust_remote_code: Annotated[
        bool, Meta(description="Run tokenizer code that ships with the checkpoint.")
    ] = False
    image_key: Annotated[str, Meta(description="Column with a row's list of images.")] = "images"
    image_patch_size: Annotated[
        PositiveInt, Meta(description="Images are resized to multiples of this, pixels.")
    ] = 14
    mm_processor_kwargs: Annotated[
        dict[str, object], Meta(description="Further arguments of the image processor.")
    ] = msgspec.field(default_factory=dict)
    train_max_samples: Annotated[
        int, Meta(description="Use at most this many training rows; -1: all.")
    ] = -1
    val_max_samples: Annotated[
        int, Meta(description="Use at most this many validation rows; -1: all.")
    ] = -1
    deduplicate: Annotated[
        bool,
        Meta(description="Issue rows with the same messages and ground truth only once."),
    ] = False
    shuffle_buffer_rows: Annotated[
        NonNegativeInt,
        Meta(
            description=(
                "Row groups are read in random order and rows shuffled within a buffer of "
                "this many rows (memory bound of streaming)."
            )
        ),
    ] = 16384
