"""Supervised warm start on pictures: teach to see and to answer, slips included.

The loss is the mean cross entropy over the answer tokens of a batch; prompts are context only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from sluice.quickstart.schedule import HoldThenDecay, slip_entropy
from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.shape_pictures import picture
from sluice.quickstart.shapes import ShapeQuestion, answer_text
from sluice.quickstart.warm_start import WarmStartResult
from sluice.types import TokenIds
from sluice.vision.image_prompts import ImagePrompt, ImagePromptReader
from sluice.vision.torch_inputs import encode_images, forward_with_images

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration

_IGNORED = -100

Encode = Callable[[str], TokenIds]
"""A question as the model's prompt, one token a picture."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureDialogue:
    """A question about a picture with the answer to imitate; ids are int64."""

    image: ImagePrompt
    prompt: TokenIds
    answer: TokenIds


def picture_dialogues(
    asked: Iterable[ShapeQuestion],
    reader: ImagePromptReader,
    encode_prompt: Encode,
    encode_answer: Encode,
    slips: random.Random,
    wrong_rate: float,
) -> Iterator[PictureDialogue]:
    """One for each question, in order; an answer slips with probability `wrong_rate`."""
    for question in asked:
        files = (picture(question.scene),)
        prompt = reader.expand(encode_prompt(question.question), files)
        said = question.slip if slips.random() < wrong_rate else question.answer
        yield PictureDialogue(reader.read(prompt, files), prompt, encode_answer(answer_text(said)))


def warm_start_on_pictures(
    model: Qwen2_5_VLForConditionalGeneration,
    dialogues: Iterable[PictureDialogue],
    settings: WarmStartSettings,
    progress: Callable[[int, int, float], None],
) -> WarmStartResult:
    """Train `model` in place, one batch after the other, until the rate is zero.

    Args:
        model: to be trained, in float32 on the CPU.
        dialogues: enough of them; each is used once.
        settings: of the optimizer and its schedule.
        progress: called as by `sluice.quickstart.warm_start.warm_start`.

    Raises:
        ValueError: fewer dialogues than that takes.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    entropy = slip_entropy(settings.wrong_step_rate)
    schedule = HoldThenDecay(settings)
    remaining = iter(dialogues)
    excess_losses: list[float] = []
    model.train()
    while not schedule.done:
        batch = list(islice(remaining, settings.batch_dialogues))
        if len(batch) < settings.batch_dialogues:
            raise ValueError(f"the dialogues ran out after {len(excess_losses)} steps")
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule.share
        loss = _train_step(model, optimizer, batch, settings.max_grad_norm)
        # One decision an answer is the slip's.
        mean_answer = sum(one.answer.size for one in batch) / len(batch)
        excess_losses.append(loss - entropy / mean_answer)
        schedule.advance(excess_losses[-1])
        progress(len(excess_losses), schedule.num_steps, loss)
    model.eval()
    tail = excess_losses[-max(1, len(excess_losses) // 10) :]
    return WarmStartResult(len(excess_losses), sum(tail) / len(tail))


def _train_step(
    model: Qwen2_5_VLForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    batch: list[PictureDialogue],
    max_grad_norm: float,
) -> float:
    width = max(one.prompt.size + one.answer.size for one in batch) - 1
    tokens = np.zeros((len(batch), width), dtype=np.int64)
    targets = np.full((len(batch), width), _IGNORED, dtype=np.int64)
    is_image = np.zeros((len(batch), width), dtype=np.bool_)
    for row, one in enumerate(batch):
        known = np.concatenate([one.prompt, one.answer])[:-1]
        tokens[row, : known.size] = known
        targets[row, one.prompt.size - 1 : known.size] = one.answer
        is_image[row, one.image.places] = True
    positions = np.stack([one.image.positions.extended(width) for one in batch], axis=1)
    pixels = np.concatenate([one.image.pixel_values for one in batch])
    grids = np.concatenate([one.image.grid_thw for one in batch])
    features = encode_images(model, torch.from_numpy(pixels), torch.from_numpy(grids))
    hidden = forward_with_images(
        model,
        torch.from_numpy(tokens),
        torch.from_numpy(positions),
        torch.from_numpy(is_image),
        features,
    )
    wanted = torch.from_numpy(targets)
    trained = wanted != _IGNORED
    loss = functional.cross_entropy(model.lm_head(hidden[trained]), wanted[trained])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return float(loss.detach())
