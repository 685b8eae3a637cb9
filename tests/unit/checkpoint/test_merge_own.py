"""A checkpoint of this trainer becomes an ordinary Hugging Face directory."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from sluice.checkpoint.merge import MergeOptions, merge_checkpoint
from sluice.checkpoint.safetensors_files import compare_weights
from sluice.checkpoint.source import find_source
from sluice.cli.main import commands
from sluice.errors import CheckpointError, ConfigError
from tests.support.tiny_policy import make_model, save_model

RUNNER = CliRunner()


def nothing(_done: int, _total: int) -> None:
    """No progress is shown."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """``global_step_7``, its weights in several files."""
    folder = tmp_path / "global_step_7"
    huggingface = folder / "actor" / "huggingface"
    save_model(huggingface, "llama")
    make_model("llama").save_pretrained(huggingface, max_shard_size="30KB")
    (huggingface / "model.safetensors").unlink(missing_ok=True)
    assert len(list(huggingface.glob("*.safetensors"))) > 1
    (folder / "data.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("given", [".", "actor", "actor/huggingface"])
def test_the_merged_folder_loads_with_the_weights_that_were_trained(
    checkpoint: Path, tmp_path: Path, given: str
) -> None:
    source = find_source(checkpoint / given)
    merge_checkpoint(source, tmp_path / "out", MergeOptions(), nothing)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    trained = make_model("llama").state_dict()
    assert loaded.dtype == torch.bfloat16
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, trained[name].bfloat16()), name
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not list(tmp_path.glob(".*"))


def test_kept_as_saved_nothing_differs(checkpoint: Path, tmp_path: Path) -> None:
    source = find_source(checkpoint)
    merge_checkpoint(source, tmp_path / "out", MergeOptions("keep"), nothing)
    assert compare_weights(tmp_path / "out", source.huggingface, nothing) == []


def test_every_kind_of_difference_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    source = find_source(checkpoint)
    merge_checkpoint(source, tmp_path / "out", MergeOptions(), nothing)
    found = compare_weights(tmp_path / "out", source.huggingface, nothing)
    assert len(found) == len(make_model("llama").state_dict())
    assert "dtype bfloat16 instead of float32" in found[0]
    save_model(tmp_path / "other", "llama", num_hidden_layers=1, intermediate_size=40)
    joined = "\n".join(compare_weights(tmp_path / "other", source.huggingface, nothing))
    assert "model.layers.1.input_layernorm.weight: only in" in joined
    assert "gate_proj.weight: shape (40, 32) instead of (48, 32)" in joined
    changed = make_model("llama")
    with torch.no_grad():
        changed.get_input_embeddings().weight[3, 0] += 0.5
    changed.save_pretrained(tmp_path / "changed")
    (reported,) = compare_weights(tmp_path / "changed", source.huggingface, nothing)
    assert reported == "model.embed_tokens.weight: 1 of 1952 values differ, by up to 0.5"


def test_an_output_matrix_is_left_out_only_if_it_equals_the_embedding(
    checkpoint: Path, tmp_path: Path
) -> None:
    options = MergeOptions(tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the input embedding"):
        merge_checkpoint(find_source(checkpoint), tmp_path / "out", options, nothing)
    assert not (tmp_path / "out").exists()
    model = make_model("llama")
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.clone())
    shutil.rmtree(checkpoint / "actor" / "huggingface")
    model.save_pretrained(checkpoint / "actor" / "huggingface")
    merge_checkpoint(find_source(checkpoint), tmp_path / "out", options, nothing)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()


def test_a_folder_with_something_in_it_is_never_written_to(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(CheckpointError, match="out is not empty"):
        merge_checkpoint(find_source(checkpoint), tmp_path / "out", MergeOptions(), nothing)


def test_a_damaged_file_is_named_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    damaged = sorted((checkpoint / "actor" / "huggingface").glob("*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{damaged.name} is damaged"):
        merge_checkpoint(find_source(checkpoint), tmp_path / "out", MergeOptions(), nothing)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        find_source(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_source(tmp_path / "none")


def test_the_command_merges_and_compares(checkpoint: Path, tmp_path: Path) -> None:
    out, saved = str(tmp_path / "out"), str(checkpoint / "actor" / "huggingface")
    done = RUNNER.invoke(commands, ["merge", str(checkpoint), out, "--dtype", "keep"])
    assert done.exit_code == 0, done.output
    equal = RUNNER.invoke(commands, ["merge", out, "--compare", saved])
    assert equal.exit_code == 0, equal.output
    assert "the weights equal those of" in equal.output
    half = str(tmp_path / "half")
    differs = RUNNER.invoke(commands, ["merge", str(checkpoint), half, "--compare", saved])
    assert differs.exit_code == 1
    assert "dtype bfloat16 instead of float32" in differs.output
    nowhere = RUNNER.invoke(commands, ["merge", str(checkpoint)])
    assert isinstance(nowhere.exception, ConfigError)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["none", "out"], "none: no such folder; give a folder global_step_N"),
        (
            [".", "--compare", "none"],
            "--compare none: no such folder; give the folder of a model or of a checkpoint",
        ),
    ],
)
def test_a_missing_folder_is_named_before_torch_is_looked_for(
    words: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    refused = RUNNER.invoke(commands, ["merge", *words])
    assert str(refused.exception) == error


@pytest.mark.parametrize(
    "file", ["actor/model_world_size_2_rank_0.pt", "actor/lora_adapter/adapter_config.json"]
)
def test_weights_are_compared_only_with_a_checkpoint_that_holds_them_whole(
    checkpoint: Path, tmp_path: Path, file: str
) -> None:
    other = tmp_path / "other" / file
    other.parent.mkdir(parents=True)
    other.touch()
    refused = RUNNER.invoke(
        commands, ["merge", str(checkpoint), "--compare", str(tmp_path / "other")]
    )
    assert isinstance(refused.exception, CheckpointError)
    assert "holds no whole weights" in str(refused.exception)
