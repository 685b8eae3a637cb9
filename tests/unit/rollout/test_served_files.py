"""An engine that serves the weights of the model's files, and files that lack some."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.vendor_engines.engine import check_files
from sluice.errors import CheckpointError, ConfigError
from sluice.types import SamplingParams
from tests.support.causal_lms import (
    engine_settings,
    expected_logprobs,
    generate,
    load_weights,
    reference_model,
    request,
    running_engine,
    save_config,
    weights_of,
)
from tests.support.engine_contract_world import EXPERTS, save_contract_checkpoint

_PROMPT = (5, 9, 23, 54)
_PLAIN = SamplingParams(1.0, 1.0, -1, 1, 0)
_REMEDY = "; copy it again, or take another checkpoint"


def saved(folder: Path, family: str = "llama") -> PreTrainedModel:
    """A model that was saved in several files."""
    model = reference_model(save_config(family, folder))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


@pytest.mark.parametrize("family", ["qwen3", "llama_biased", "gpt_oss", "bloom"])
async def test_the_weights_of_the_files_serve_as_version_0_from_the_start(
    family: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, family)
    async with running_engine(tmp_path, serves_model_files=True) as engine:
        load = engine.load()
        assert (load.version, load.weight_digest) == (0, "files")
        tokens, logprobs = (await generate(engine, request(_PROMPT)))[0]
        assert engine.load().seconds_by_state["idle"] > 0
    np.testing.assert_allclose(
        logprobs, expected_logprobs(model, _PROMPT, tokens, _PLAIN), atol=1e-4
    )


async def test_samples_are_those_of_the_same_weights_from_a_trainer(tmp_path: Path) -> None:
    model, wanted = saved(tmp_path), request(_PROMPT, samples=4)
    async with running_engine(tmp_path, serves_model_files=True) as engine:
        served = await generate(engine, wanted)
        await load_weights(engine, weights_of(reference_model(tmp_path, 1), engine), 1, "one")
        assert engine.load().version == 1
        assert await generate(engine, wanted) != served
    async with running_engine(tmp_path, model) as engine:
        assert await generate(engine, wanted) == served


async def refused(folder: Path, error: type[Exception], message: str) -> None:
    """Neither this engine starts, nor those of vendors, for this reason."""
    with pytest.raises(error, match=message):
        await EmbeddedEngine(engine_settings(folder, serves_model_files=True)).start()
    with pytest.raises(error, match=message):
        check_files(folder, build_causal_lm(str(folder), torch.device("meta")))


async def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    await refused(tmp_path, CheckpointError, f"{tmp_path} lacks {gone.name}, which .*{_REMEDY}")


async def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    cut = sorted(tmp_path.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-8])
    await refused(tmp_path, CheckpointError, f"{cut} is damaged .*{_REMEDY}")


async def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    file = tmp_path / index["weight_map"]["model.norm.weight"]
    with safe_open(file, framework="pt") as opened:
        kept = {n: opened.get_tensor(n) for n in opened.keys() if n != "model.norm.weight"}  # noqa: SIM118
    save_file(kept, file, metadata={"format": "pt"})
    await refused(tmp_path, CheckpointError, f"{file} lacks model.norm.weight, which .*{_REMEDY}")


async def test_weights_that_no_file_names_are_missing(tmp_path: Path) -> None:
    saved(tmp_path).save_pretrained(tmp_path)
    for file in tmp_path.glob("model-*"):
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    await refused(tmp_path, ConfigError, r"1 weights.*, first model\.norm\.weight")


async def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_config("llama", tmp_path)
    await refused(
        tmp_path, ConfigError, r"model\.path='.*' (cannot be loaded|lacks \*\.safetensors)"
    )


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "bloom", "qwen3_moe"])
def test_complete_files_are_accepted_whatever_they_split_or_tie(
    family: str, tmp_path: Path
) -> None:
    if family == "qwen3_moe":
        save_contract_checkpoint(EXPERTS, tmp_path)
    else:
        saved(tmp_path, family)
    check_files(tmp_path, build_causal_lm(str(tmp_path), torch.device("meta")))


def test_files_with_names_that_transformers_does_not_write_are_the_vendors_to_judge(
    tmp_path: Path,
) -> None:
    save_config("llama", tmp_path)
    save_file({"old.norm": torch.ones(3)}, tmp_path / "model.safetensors")
    check_files(tmp_path, build_causal_lm(str(tmp_path), torch.device("meta")))
