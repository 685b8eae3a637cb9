"""Make the files of the task with pictures: data, and a small Qwen2.5-VL with its warm start.

The warm start teaches the model to see and to answer, slips included.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from sluice.quickstart.model import (
    IGNORED,
    WarmStartProgress,
    fit,
    one_torch_thread,
    save_model,
    slip_entropy,
    whole_batches,
)
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, WarmStartSettings
from sluice.quickstart.shapes import (
    SIDE_PIXELS,
    ShapeQuestion,
    answer_text,
    picture,
    questions,
    write_shapes,
)
from sluice.quickstart.tokenizer import (
    IMAGE_PAD,
    PAD_TOKEN,
    TURN_END,
    VIDEO_PAD,
    VISION_CHAT_TEMPLATE,
    VISION_END,
    VISION_START,
    VISION_TOKENS,
    render_prompt,
    save_image_processor,
    save_tokenizer,
    train_on_texts,
)
from sluice.types import IMAGE_MARK, TokenIds
from sluice.vision.image_prompts import ImagePrompt, ImagePromptReader, load_image_prompts
from sluice.vision.torch_inputs import encode_images, forward_with_images

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_POSITIONS = 256
PATCH_PIXELS = 8
_WIDTH = 64
_SHOWN = f"{VISION_START}{IMAGE_PAD}{VISION_END}"


def make_config(tokenizer: Tokenizer) -> Qwen2_5_VLConfig:
    """Return two layers of width 64 behind a vision tower of one layer, tied embeddings, float32.

    Text layers have heads of 32, the smallest that vLLM's attention supports on a CPU.
    """
    vocabulary = tokenizer.get_vocab()
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": _WIDTH,
        "intermediate_size": 3 * _WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 200.0,
            "mrope_section": [4, 6, 6],
        },
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": vocabulary[TURN_END],
        "pad_token_id": vocabulary[PAD_TOKEN],
    }
    vision = {
        "depth": 1,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_heads": 4,
        "out_hidden_size": _WIDTH,
        "patch_size": PATCH_PIXELS,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 2 * SIDE_PIXELS,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.08,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary[IMAGE_PAD],
        video_token_id=vocabulary[VIDEO_PAD],
        vision_start_token_id=vocabulary[VISION_START],
        vision_end_token_id=vocabulary[VISION_END],
        tie_word_embeddings=True,
        dtype="float32",
    )


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a model with random weights from `seed`; the global random state stays as it is."""
    config = make_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PAD_TOKEN),
        do_sample=True,
    )
    return model


def save_processor(directory: Path) -> None:
    """Write the image processor of the model; pictures keep their size."""
    directory.mkdir(parents=True, exist_ok=True)
    pixels = SIDE_PIXELS**2
    save_image_processor(directory, patch_size=PATCH_PIXELS, min_pixels=pixels, max_pixels=pixels)


@dataclass(frozen=True, slots=True, eq=False)
class PictureDialogue:
    """A question about a picture, with the answer to imitate; ids are int64."""

    image: ImagePrompt
    prompt: TokenIds
    answer: TokenIds


def _dialogues(
    stream: str, tokenizer: Tokenizer, reader: ImagePromptReader, wrong_rate: float
) -> Iterator[PictureDialogue]:
    """Yield dialogues without end; an answer slips with probability `wrong_rate`."""
    slips = random.Random(f"{stream}/slips")

    def ids(text: str) -> TokenIds:
        return np.asarray(tokenizer.encode(text).ids, dtype=np.uint32)

    for question in questions(stream):
        files = (picture(question.scene),)
        prompt = reader.expand(ids(_prompt(question)), files)
        answer = question.slip if slips.random() < wrong_rate else question.answer
        said = ids(answer_text(answer) + TURN_END)
        yield PictureDialogue(reader.read(prompt, files), prompt, said)


def warm_start_on_pictures(
    model: Qwen2_5_VLForConditionalGeneration,
    dialogues: Iterable[PictureDialogue],
    settings: WarmStartSettings,
    progress: WarmStartProgress,
) -> None:
    """Train `model` in place, one batch after the other, until the rate is zero.

    Raises:
        ValueError: there are too few dialogues; each is used once.
    """
    entropy = slip_entropy(settings.wrong_step_rate)

    def loss_of(batch: list[PictureDialogue]) -> tuple[torch.Tensor, float]:
        # An answer has one slip at most.
        mean_answer_tokens = sum(one.answer.size for one in batch) / len(batch)
        return _loss(model, batch), entropy / mean_answer_tokens

    fit(model, whole_batches(dialogues, settings.batch_dialogues), loss_of, settings, progress)


def _loss(model: Qwen2_5_VLForConditionalGeneration, batch: list[PictureDialogue]) -> torch.Tensor:
    width = max(one.prompt.size + one.answer.size for one in batch) - 1
    tokens = np.zeros((len(batch), width), dtype=np.int64)
    targets = np.full((len(batch), width), IGNORED, dtype=np.int64)
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
    trained = wanted != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[trained]), wanted[trained])


def make_shapes(
    directory: Path,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> None:
    """Write `data/train.parquet`, `data/test.parquet` and `model/` into `directory`."""
    held_out = islice(questions(f"{seed}/held-out"), sizes.num_held_out)
    write_shapes(directory / "data" / "test.parquet", held_out, "test")
    train = islice(questions(f"{seed}/train"), sizes.num_train)
    write_shapes(directory / "data" / "train.parquet", train, "train")
    samples = islice(questions(f"{seed}/tokenizer"), sizes.num_tokenizer_dialogues)
    tokenizer = train_on_texts(
        (_prompt(one) + answer_text(one.answer) for one in samples), VISION_TOKENS
    )
    progress(PrepareProgress("data", 1, 1))
    folder = directory / "model"
    shutil.rmtree(folder, ignore_errors=True)
    save_processor(folder)
    save_tokenizer(tokenizer, folder, MAX_POSITIONS, VISION_CHAT_TEMPLATE)
    model = make_model(tokenizer, seed)
    model.config.save_pretrained(folder)
    reader = load_image_prompts(folder)
    assert reader is not None
    wrong_rate = sizes.warm_start.wrong_step_rate
    dialogues = _dialogues(f"{seed}/warm-start", tokenizer, reader, wrong_rate)
    with one_torch_thread():
        warm_start_on_pictures(model, dialogues, sizes.warm_start, progress)
    save_model(model, folder)


def _prompt(question: ShapeQuestion) -> str:
    """Return the rendered prompt, in which the picture is one token."""
    return render_prompt(question.question.replace(IMAGE_MARK, _SHOWN))
