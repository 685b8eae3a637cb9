"""What is no trainable model is refused by one error that names the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.learner.model.loading import load_policy
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.errors import ConfigError
from tests.support.tiny_policy import save_model

CPU = torch.device("cpu")
FLOAT32 = FsdpConfig(dtype="float32")


def load(folder: Path, precision: FsdpConfig = FLOAT32, *, checkpointing: bool = False) -> None:
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=checkpointing)
    load_policy(model, precision, CPU, max_tokens=28)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path='.*': no config\.json there; give the dir"):
        load(tmp_path)


def test_a_broken_configuration_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such family"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.path='.*' cannot be loaded"):
        load(tmp_path)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights are missing .* first model\.norm\.weight"):
        load(folder)


def test_a_sliding_window_that_hides_tokens_is_refused_at_start(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "mistral", sliding_window=27)
    with pytest.raises(ConfigError, match=r"sliding_window=27, shorter than .* = 28"):
        load(folder)


def test_a_sliding_window_over_every_sequence_is_accepted(tmp_path: Path) -> None:
    load(save_model(tmp_path, "mistral", sliding_window=28))


def test_computing_more_precisely_than_the_weights_is_refused(tmp_path: Path) -> None:
    precision = FsdpConfig(model_dtype="bfloat16", dtype="float32")
    with pytest.raises(ConfigError, match="set model_dtype=float32 or dtype=bfloat16"):
        load(tmp_path, precision)
