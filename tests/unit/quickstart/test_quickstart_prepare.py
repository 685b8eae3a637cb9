"""`prepare` makes a complete directory once, and again if it differs from the request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.errors import ConfigError
from sluice.quickstart.arithmetic import TASKS
from sluice.quickstart.prepare import QuickstartAssets, prepare
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, WarmStartSettings

SMALL = PrepareSettings(
    num_train=40,
    num_held_out=8,
    num_tokenizer_dialogues=100,
    warm_start=WarmStartSettings(max_hold_steps=2, decay_steps=1, batch_dialogues=4),
)


def make(
    directory: Path,
    seed: int = 0,
    settings: PrepareSettings = SMALL,
    events: list[PrepareProgress] | None = None,
) -> QuickstartAssets:
    sink: list[PrepareProgress] = [] if events is None else events
    return prepare(directory, task="quickstart", seed=seed, progress=sink.append, settings=settings)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "prepared.json"
    }


def test_a_made_directory_loads_as_model_tokenizer_and_data(tmp_path: Path) -> None:
    events: list[PrepareProgress] = []
    assets = make(tmp_path, events=events)
    model = AutoModelForCausalLM.from_pretrained(assets.model_dir, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(assets.model_dir, local_files_only=True)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert pq.read_metadata(assets.train_file).num_rows == 40
    assert pq.read_metadata(assets.val_file).num_rows == 8
    assert [(event.stage, event.done, event.total) for event in events] == [
        ("data", 1, 1),
        ("warm-start", 1, 3),
        ("warm-start", 2, 3),
        ("warm-start", 3, 3),
    ]


def test_the_task_of_experts_has_a_published_mixture_of_experts(tmp_path: Path) -> None:
    assets = prepare(tmp_path, task="experts", seed=0, progress=lambda _event: None, settings=SMALL)
    model = AutoModelForCausalLM.from_pretrained(assets.model_dir, local_files_only=True)
    assert (model.config.model_type, model.config.num_experts) == ("qwen3_moe", 8)
    names = load_file(assets.model_dir / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in names
    assert assets.task.max_prompt_tokens == TASKS["quickstart"].max_prompt_tokens
    assert (assets.model_dir / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_the_task_of_qwen2_has_a_dense_model_with_biases_of_about_the_same_size(
    tmp_path: Path,
) -> None:
    assets = prepare(tmp_path, task="qwen2", seed=0, progress=lambda _event: None, settings=SMALL)
    model = AutoModelForCausalLM.from_pretrained(assets.model_dir, local_files_only=True)
    assert model.config.model_type == "qwen2"
    names = load_file(assets.model_dir / "model.safetensors").keys()
    assert "model.layers.1.self_attn.q_proj.bias" in names
    assert 100_000 < model.num_parameters() < 130_000


def test_a_complete_directory_is_used_as_it_is(tmp_path: Path) -> None:
    first = make(tmp_path)
    modified = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    events: list[PrepareProgress] = []
    second = make(tmp_path, events=events)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == modified
    assert second == first
    assert [event.stage for event in events] == ["reused"]


@pytest.mark.parametrize("damage", ["missing", "changed", "unstamped", "unreadable stamp"])
def test_an_incomplete_directory_is_made_again(tmp_path: Path, damage: str) -> None:
    assets = make(tmp_path)
    whole = contents(tmp_path)
    stamp = tmp_path / "prepared.json"
    match damage:
        case "missing":
            assets.val_file.unlink()
        case "changed":
            weights = assets.model_dir / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
        case "unstamped":
            stamp.unlink()
        case _:
            stamp.write_text("[")
    make(tmp_path)
    assert contents(tmp_path) == whole


def test_other_settings_or_another_seed_make_it_again(tmp_path: Path) -> None:
    before = make(tmp_path)
    make(tmp_path, settings=replace(SMALL, num_train=41))
    assert pq.read_metadata(before.train_file).num_rows == 41
    first = contents(tmp_path)
    make(tmp_path, settings=replace(SMALL, num_train=41), seed=1)
    assert contents(tmp_path) != first


def test_an_interrupted_making_leaves_no_stamp(tmp_path: Path) -> None:
    make(tmp_path)

    def interrupt(event: PrepareProgress) -> None:
        if event.stage == "warm-start":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, task="quickstart", seed=1, progress=interrupt, settings=SMALL)
    assert not (tmp_path / "prepared.json").exists()


def test_the_stamp_names_the_settings_it_is_of(tmp_path: Path) -> None:
    make(tmp_path, seed=5)
    settings = json.loads((tmp_path / "prepared.json").read_text())["settings"]
    assert settings["seed"] == 5
    assert settings["warm_start"]["decay_steps"] == 1


def test_an_unknown_task_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task"):
        prepare(tmp_path / "new", task="sums", seed=0, progress=lambda _event: None)
    assert not (tmp_path / "new").exists()
