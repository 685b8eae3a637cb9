"""Train batches of made-up samples, most of whose prompts have images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sluice.types import DataProgress, TrainBatch, TrainGroup
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts
from tests.support.domain_values import with_turn
from tests.support.tiny_policy import VOCABULARY, make_group
from tests.support.tiny_vision import IMAGE, VISION_END, VISION_START, image_file

_SIZES = ((56, 56), (112, 40), (30, 90))
PADDED = np.array([VISION_START, IMAGE, VISION_END], np.uint32)


def make_reader(model: Path) -> ImagePromptReader:
    """Of a model's folder, which must read images."""
    reader = load_image_prompts(model)
    assert reader is not None
    return reader


def make_image_group(reader: ImagePromptReader, seed: int, num_images: int) -> TrainGroup:
    """A prompt with so many images; one sample draws the images' own token, as text."""
    group = make_group(seed)
    assert VOCABULARY > IMAGE
    words = np.where(group.prompt_token_ids == IMAGE, IMAGE + 1, group.prompt_token_ids)
    images = tuple(
        image_file(seed + number, *_SIZES[(seed + number) % len(_SIZES)])
        for number in range(num_images)
    )
    prompt = np.concatenate([*[PADDED] * num_images, words]).astype(np.uint32)
    first = group.rollouts[0].token_ids.copy()
    if num_images:
        prompt = reader.expand(prompt, images)
        first[-1 if first.size == 1 else -2] = IMAGE
    rollouts = (with_turn(group.rollouts[0], token_ids=first), *group.rollouts[1:])
    return replace(group, prompt_token_ids=prompt, rollouts=rollouts, images=images)


def make_image_batch(reader: ImagePromptReader, num_groups: int = 6, seed: int = 0) -> TrainBatch:
    """A batch of prompts with one, two and no images; equal seeds give equal batches."""
    groups = tuple(
        make_image_group(reader, 1000 * seed + number, (number + 1) % 3)
        for number in range(num_groups)
    )
    return TrainBatch(f"batch-{seed}", seed, groups, DataProgress(num_groups), {})


def without_sampled_images(group: TrainGroup) -> TrainGroup:
    """transformers' own forward would take a sampled image token for an image's position."""
    for rollout in group.rollouts:
        rollout.token_ids[rollout.token_ids == IMAGE] = IMAGE + 1
    return group
