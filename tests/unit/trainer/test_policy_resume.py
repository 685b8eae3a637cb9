"""A resumed learner goes on bit for bit, and other tools can load what it saved."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.learner.checkpoint import CheckpointStore
from services.trainer.learner.ranks.parallel import SingleProcess
from services.trainer.learner.worker import Learner
from sluice.errors import CheckpointError
from sluice.types import DataProgress
from tests.support.tiny_policy import make_batch, make_config, save_model

PRECISIONS: list[dict[str, object]] = [
    {"dtype": "float32"},
    {"model_dtype": "bfloat16", "dtype": "bfloat16"},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_learner(model: Path, precision: dict[str, object] = PRECISIONS[0]) -> Learner:
    optim = {"lr": 1e-2, "lr_warmup_steps": 2, "lr_scheduler_type": "linear"}
    config = make_config(model, optim=optim, fsdp_config=precision, shuffle=True)
    return Learner(config, SingleProcess(), total_steps=6)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


@pytest.mark.parametrize("precision", PRECISIONS, ids=["float32", "bfloat16"])
def test_resuming_continues_bit_for_bit(
    tmp_path: Path, model_folder: Path, precision: dict[str, object]
) -> None:
    straight = make_learner(model_folder, precision)
    for step in (1, 2):
        straight.train_step(make_batch(seed=step), step)
    straight.save(tmp_path / "actor")
    expected = [straight.train_step(make_batch(seed=step), step) for step in (3, 4)]

    resumed = make_learner(model_folder, precision)
    resumed.load(tmp_path / "actor")
    found = [resumed.train_step(make_batch(seed=step), step) for step in (3, 4)]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy"):
        assert [metrics[name] for metrics in found] == [metrics[name] for metrics in expected]
    after = weights(resumed)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(straight).items())


@pytest.mark.parametrize("precision", PRECISIONS, ids=["float32", "bfloat16"])
def test_the_saved_model_is_an_ordinary_hugging_face_model(
    tmp_path: Path, model_folder: Path, precision: dict[str, object]
) -> None:
    learner = make_learner(model_folder, precision)
    learner.train_step(make_batch(), 2)
    learner.save(tmp_path / "actor")
    folder = tmp_path / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    trained = weights(learner)
    assert {name for name, _ in loaded.named_parameters()} == trained.keys()
    for name, weight in loaded.named_parameters():
        assert weight.dtype == trained[name].dtype
        assert torch.equal(weight, trained[name])
    assert (folder / "tokenizer.json").is_file()


def test_a_checkpoint_is_readable_for_everybody(tmp_path: Path, model_folder: Path) -> None:
    make_learner(model_folder).save(tmp_path / "actor")
    modes = {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.rglob("*.safetensors")}
    assert modes == {0o644}


def test_saving_before_any_step_can_be_resumed(tmp_path: Path, model_folder: Path) -> None:
    fresh = make_learner(model_folder)
    fresh.save(tmp_path / "actor")
    resumed = make_learner(model_folder)
    resumed.load(tmp_path / "actor")
    expected = fresh.train_step(make_batch(), 2)
    assert resumed.train_step(make_batch(), 2)["actor/grad_norm"] == expected["actor/grad_norm"]


def test_tied_weights_are_listed_once(model_folder: Path) -> None:
    names = [name for name, _ in make_learner(model_folder).named_weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model_folder: Path) -> None:
    other = make_learner(save_model(tmp_path / "other", num_hidden_layers=1))
    other.save(tmp_path / "actor")
    with pytest.raises(
        CheckpointError, match=r"do not fit the model at .*, first model\.layers\.1"
    ):
        make_learner(model_folder).load(tmp_path / "actor")


def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path, model_folder: Path) -> None:
    make_learner(save_model(tmp_path / "other", family="llama")).save(tmp_path / "actor")
    with pytest.raises(CheckpointError, match=r"holds a llama model and .* a qwen3; resume with"):
        make_learner(model_folder).load(tmp_path / "actor")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("optimizer.safetensors", b"not it"),
        ("extra_state.json", b"not it"),
        ("extra_state.json", b'{"skipped_updates": 0, "random_state": {"cpu": "00"}}'),
        ("extra_state.json", b'{"skipped_updates": 0, "random_state": ["00"]}'),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, model_folder: Path, file: str, content: bytes
) -> None:
    learner = make_learner(model_folder)
    learner.save(tmp_path / "actor")
    (tmp_path / "actor" / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        learner.load(tmp_path / "actor")


@pytest.mark.parametrize("file", ["huggingface/model.safetensors", "optimizer.safetensors"])
def test_a_truncated_file_is_named_with_the_checkpoint_to_use_instead(
    tmp_path: Path, model_folder: Path, file: str
) -> None:
    learner = make_learner(model_folder)
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, learner.save, DataProgress(step), {})
    damaged = tmp_path / "global_step_2" / "actor" / file
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=rf"{file} .*resume_from_path=.*global_step_1"):
        store.latest()  # by its size
    with pytest.raises(CheckpointError, match=rf"{file} cannot be .*resume_from_path=.*_step_1"):
        learner.load(tmp_path / "global_step_2" / "actor")  # and by its content
