"""Model and data of the run in small: triangles in the form of Geometry3k, and a tiny Qwen3-VL-MoE.

A question asks for one of the two sides at the right angle. Six times in ten a teacher of the warm
start takes it for one longer.
"""

import io
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from torch.nn import functional
from transformers import GenerationConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from sluice.data.prepare import THINK_INSTRUCTION
from sluice.quickstart.model import (
    IGNORED,
    fit,
    one_torch_thread,
    save_model,
    slip_entropy,
    whole_batches,
)
from sluice.quickstart.settings import WarmStartSettings
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
from sluice.types import IMAGE_MARK
from sluice.vision.image_prompts import load_image_prompts
from sluice.vision.torch_inputs import encode_images, forward_with_images

WIDTH = 64
MAX_POSITIONS = 256
SIDE, PATCH, UNIT, LONGEST = 48, 8, 8, 5
SHOWN = f"{VISION_START}{IMAGE_PAD}{VISION_END}"
SETTINGS = WarmStartSettings(
    batch_dialogues=32,
    learning_rate=3e-3,
    hold_until_excess_loss=0.02,
    max_hold_steps=600,
    decay_steps=60,
    wrong_step_rate=0.6,
)


def problems(stream):
    """Yield a picture, the question about it, and the answer, without end."""
    rng = random.Random(stream)
    while True:
        across, up = rng.randint(1, LONGEST), rng.randint(1, LONGEST)
        left, bottom = rng.randint(1, 5), SIDE - rng.randint(2, 6)
        image = Image.new("RGB", (SIDE, SIDE), "white")
        corners = [(left, bottom), (left + UNIT * across, bottom), (left, bottom - UNIT * up)]
        ImageDraw.Draw(image).polygon(corners, fill=(60, 60, 60))
        file = io.BytesIO()
        image.save(file, format="PNG")
        side, answer = rng.choice([("AB", across), ("AC", up)])
        yield file.getvalue(), f"{IMAGE_MARK}Angle A is right. Find {side}.", answer


def user_text(problem):
    return render_prompt(f"{problem} {THINK_INSTRUCTION}".replace(IMAGE_MARK, SHOWN))


def solution(problem, answer):
    return f"<think>{problem[-3:-1]} = {answer}</think>\\boxed{{{answer}}}"


def write_published(file, stream, number):
    """Write a file as Geometry3k is published."""
    rows = [
        {"images": [{"bytes": image, "path": None}], "problem": problem, "answer": str(answer)}
        for image, problem, answer in islice(problems(stream), number)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def new_model(tokenizer, seed):
    ids = tokenizer.get_vocab()
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 200.0,
            "mrope_section": [4, 6, 6],
            "mrope_interleaved": True,
        },
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[PAD_TOKEN],
    }
    vision = {
        "depth": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_heads": 4,
        "out_hidden_size": WIDTH,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.08,
    }
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3VLMoeForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=ids[TURN_END], pad_token_id=ids[PAD_TOKEN], do_sample=True
    )
    return model


def dialogues(stream, tokenizer, reader):
    slips = random.Random(f"{stream}/slips")

    def ids(text):
        return np.asarray(tokenizer.encode(text).ids, dtype=np.uint32)

    for image, problem, answer in problems(stream):
        prompt = reader.expand(ids(user_text(problem)), (image,))
        read = answer + (slips.random() < SETTINGS.wrong_step_rate)
        said = ids(solution(problem, read) + TURN_END)
        yield reader.read(prompt, (image,)), prompt, said


def save_processor(folder):
    """Write the image processor of the model; pictures keep their size."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = SIDE**2
    save_image_processor(folder, patch_size=PATCH, min_pixels=pixels, max_pixels=pixels)


def warm_start(model, dialogues):
    """Train the model in place; `dialogues` yields image, prompt and answer of each."""
    entropy = slip_entropy(SETTINGS.wrong_step_rate)

    def loss_of(batch):
        # An answer has one slip at most.
        mean_answer_tokens = sum(answer.size for _, _, answer in batch) / len(batch)
        return loss(model, batch), entropy / mean_answer_tokens

    batches = whole_batches(dialogues, SETTINGS.batch_dialogues)
    fit(model, batches, loss_of, SETTINGS, lambda *_: None)


def loss(model, batch):
    width = max(prompt.size + answer.size for _, prompt, answer in batch) - 1
    tokens = np.zeros((len(batch), width), dtype=np.int64)
    targets = np.full((len(batch), width), IGNORED, dtype=np.int64)
    is_image = np.zeros((len(batch), width), dtype=np.bool_)
    for row, (image, prompt, answer) in enumerate(batch):
        known = np.concatenate([prompt, answer])[:-1]
        tokens[row, : known.size] = known
        targets[row, prompt.size - 1 : known.size] = answer
        is_image[row, image.places] = True
    images = [image for image, _, _ in batch]
    positions = np.stack([image.positions.extend(width) for image in images], axis=1)
    pixels = np.concatenate([image.pixel_values for image in images])
    grids = np.concatenate([image.grid_thw for image in images])
    features = encode_images(model, torch.from_numpy(pixels), torch.from_numpy(grids))
    inputs = (torch.from_numpy(one) for one in (tokens, positions, is_image))
    hidden = forward_with_images(model, *inputs, features)
    wanted = torch.from_numpy(targets)
    trained = wanted != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[trained]), wanted[trained])


def make(folder: Path, seed: int) -> None:
    data, model_dir = folder / "data", folder / "model"
    for split, number in (("train", 3_000), ("test", 256)):
        published = folder / "published" / f"{split}.parquet"
        write_published(published, f"{seed}/{split}", number)
        command = ["data", "prepare", "geo3k", "--input", published, "--output", data]
        command += ["--split", split]
        subprocess.run(
            [sys.executable, "-m", "sluice.cli.main", *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (data / f"geo3k-{split}.parquet").replace(data / f"{split}.parquet")
    samples = islice(problems(f"{seed}/tokenizer"), 500)
    texts = (user_text(problem) + solution(problem, answer) for _, problem, answer in samples)
    tokenizer = train_on_texts(texts, VISION_TOKENS)
    save_processor(model_dir)
    save_tokenizer(tokenizer, model_dir, MAX_POSITIONS, VISION_CHAT_TEMPLATE)
    model = new_model(tokenizer, seed)
    model.config.save_pretrained(model_dir)
    stream = dialogues(f"{seed}/warm-start", tokenizer, load_image_prompts(model_dir))
    with one_torch_thread():
        warm_start(model, stream)
    save_model(model, model_dir)
