"""`data.*`: which prompts to train and validate on."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Literal

import msgspec

from sluice.config.schema.section import NonNegativeInt, PositiveInt, Section

FileList = str | list[str]


def file_list(files: str | list[str] | None) -> list[str]:
    """Return the files of a key that takes one, several or none, in their order.

    A pattern such as ``rows/*.parquet`` stands for the files that match it, by name.
    """
    patterns = [files] if isinstance(files, str) else files or []
    return [file for name in patterns for file in _expand_pattern(name)]


def _expand_pattern(name: str) -> list[str]:
    """Return the files of a pattern; any other name as it is, a pattern of no file too."""
    if not glob.has_magic(name) or Path(name).exists():
        return [name]
    return sorted(glob.glob(name, recursive=True)) or [name]


class DataConfig(Section, frozen=True):
    """Data sets in verl's Parquet format, and the batch size."""

    train_files: FileList | None = None
    """Parquet file or files of training prompts, or patterns, read in this order; none: the run
    trains only on prompts that clients submit.
    """

    val_files: FileList | None = None
    """Parquet file or files of validation prompts, or patterns; none: no validation."""

    prompt_key: str = "prompt"
    """Column that holds the chat messages of a prompt."""

    reward_fn_key: str = "data_source"
    """Column that selects a row's scorer and groups the validation metrics."""

    max_prompt_length: PositiveInt = 512
    """Longest prompt, in tokens; truncation decides what happens to longer ones."""

    max_response_length: PositiveInt = 512
    """Longest response, in tokens; generation stops there."""

    train_batch_size: PositiveInt = 1024
    """Prompts (groups) in one train batch; its rows are this number times rollout.n."""

    gen_batch_size: PositiveInt | None = None
    """Prompts of one wave, with sampling strategy rounds; none: train_batch_size."""

    shuffle: bool = True
    """Shuffle the training set, in a new order every epoch."""

    seed: int | None = None
    """Seed of the shuffle; none: 0."""

    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt that is longer than max_prompt_length: error drops it with a
    warning; left, right and middle cut tokens there.
    """

    filter_overlong_prompts: bool = False
    """Skip prompts that are longer than max_prompt_length, whatever truncation is set to."""

    validation_shuffle: bool = False
    """Shuffle the validation set."""

    apply_chat_template_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Additional arguments of the chat template, such as enable_thinking."""

    trust_remote_code: bool = False
    """Run Python code that ships with the tokenizer."""

    image_key: str = "images"
    """Column that holds the list of a row's images."""

    image_patch_size: PositiveInt = 14
    """Images are resized to multiples of this many pixels."""

    mm_processor_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Additional arguments of the image processor."""

    train_max_samples: int = -1
    """Use at most this many training rows; -1: all."""

    val_max_samples: int = -1
    """Use at most this many validation rows; -1: all."""

    deduplicate: bool = False
    """Skip rows that repeat the messages and the ground truth of an earlier row."""

    shuffle_buffer_rows: NonNegativeInt = 16384
    """Rows held in memory for shuffling: the reader takes row groups in random order and shuffles
    rows within this buffer.
    """
