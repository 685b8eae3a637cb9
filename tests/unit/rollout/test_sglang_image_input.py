"""Images as SGLang gets them: the trainer's patches and positions, at the prompt's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.engines.sglang.client import image_data
from sluice.vision.image_prompts import load_image_prompts
from tests.support.tiny_vision import IMAGE, VISION_END, VISION_START, image_file, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen2_5_vl", directory)
    return directory


def test_sglang_gets_the_patches_the_places_and_the_positions_of_the_trainer(folder: Path) -> None:
    reader = load_image_prompts(folder)
    assert reader is not None
    files = (image_file(1, 56, 56), image_file(2, 100, 75))
    place = [VISION_START, IMAGE, VISION_END]
    prompt = reader.expand(np.array([20, *place, *place, 30], np.uint32), files)
    exact = reader.read(prompt, files)
    continued = len(prompt) + 3
    data: dict[str, Any] = image_data(exact, continued)
    assert data["format"] == "processor_output"
    assert torch.equal(data["pixel_values"], torch.from_numpy(exact.pixel_values))
    assert data["image_grid_thw"].tolist() == exact.grid_thw.tolist()
    places = [
        np.arange(first, last + 1, dtype=np.int64).tolist() for first, last in data["offsets"]
    ]
    assert [one for image in places for one in image] == exact.places.tolist()
    assert all(prompt[one] == IMAGE for image in places for one in image)
    positions = data["mrope_positions"]
    assert positions.shape == (3, continued)
    assert positions[:, : len(prompt)].tolist() == exact.positions.prompt.tolist()
    # SGLang gives the token after the last the position that follows the largest.
    assert int(positions.max()) + 1 - continued == int(data["mrope_position_delta"])
