"""Rows of prompts with images, and their gradients by transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.trainer.learner.batch.packed_rows import TrainingRow, training_rows
from sluice.types import TrainGroup
from sluice.vision.image_prompts import ImagePrompt
from tests.support.layer_parity import TEMPERATURE, Gradients, gradients
from tests.support.tiny_vision import FullForward
from tests.support.vision_batches import make_image_group, make_reader, without_sampled_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUM_IMAGES = (1, 2, 0, 1, 2)
"""Of each prompt."""


def image_rows(folder: Path) -> tuple[list[TrainingRow], dict[int, ImagePrompt]]:
    """Four rows of each prompt, and the prompts' images by `TrainingRow.group`."""
    reader, groups = make_reader(folder), _groups(folder)
    images = {
        number: reader.lay_out(group.prompt_token_ids, group.images)
        for number, group in enumerate(groups)
        if group.images
    }
    return _rows(groups), images


def plain_with_images(folder: Path, model: PreTrainedModel) -> Gradients:
    """Gradients of `layer_parity`'s loss of all rows, each alone and not packed."""
    groups = _groups(folder)
    full = FullForward(folder, model.requires_grad_(requires_grad=True), differentiable=True)
    loss = torch.zeros(())
    for row in _rows(groups):
        prompt, own = row.prompt_token_ids.tolist(), row.token_ids.tolist()
        logits = full.logits([*prompt, *own], groups[row.group].images, len(prompt))
        logprobs = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        weights = (31.0 * row.number + torch.arange(len(own))).sin()
        sampled = logprobs[torch.arange(len(own)), torch.tensor(own)]
        loss = loss + (sampled * weights).sum() - 0.1 * (logprobs.exp() * logprobs).sum()
    return gradients(model, loss)


def _groups(folder: Path) -> list[TrainGroup]:
    reader = make_reader(folder)
    return [
        without_sampled_images(make_image_group(reader, seed, number))
        for seed, number in enumerate(_NUM_IMAGES)
    ]


def _rows(groups: list[TrainGroup]) -> list[TrainingRow]:
    ends = np.cumsum([len(group.rollouts) for group in groups]).tolist()
    return training_rows(
        groups, [range(end - len(one.rollouts), end) for end, one in zip(ends, groups, strict=True)]
    )
