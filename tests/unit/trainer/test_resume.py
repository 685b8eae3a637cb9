"""A resumed learner continues bit for bit, on other ranks and with its random generators."""

from __future__ import annotations

import stat
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from services.trainer.learner.checkpoint import CheckpointStore
from services.trainer.learner.learner import Learner
from services.trainer.learner.model.trained_model import random_state, restore_random_state
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import StateFiles
from sluice.errors import CheckpointError
from sluice.types import DataProgress
from tests.support.crashing_saver import write_checkpoint
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_config, save_model

GROUPS = 4
PRECISIONS: list[dict[str, object]] = [
    {"dtype": "float32"},
    {"model_dtype": "bfloat16", "dtype": "bfloat16"},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_learner(model: Path, precision: dict[str, object] = PRECISIONS[0]) -> Learner:
    optim = {"lr": 1e-2, "lr_warmup_steps": 2, "lr_scheduler_type": "linear"}
    config = make_config(model, GROUPS, optim=optim, fsdp_config=precision, shuffle=True)
    return Learner(config, ParallelContext(), total_steps=6)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


@pytest.mark.parametrize("precision", PRECISIONS, ids=["float32", "bfloat16"])
def test_resuming_continues_bit_for_bit(
    tmp_path: Path, model_folder: Path, precision: dict[str, object]
) -> None:
    straight = make_learner(model_folder, precision)
    for step in (1, 2):
        straight.train_step(make_batch(GROUPS, seed=step), step)
    straight.save(tmp_path / "actor")
    expected = straight.train_step(make_batch(GROUPS, seed=3), 3)

    resumed = make_learner(model_folder, precision)
    resumed.load(tmp_path / "actor")
    found = resumed.train_step(make_batch(GROUPS, seed=3), 3)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy"):
        assert found[name] == expected[name]
    after = weights(resumed)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(straight).items())


@pytest.mark.parametrize("precision", PRECISIONS, ids=["float32", "bfloat16"])
def test_the_saved_model_is_an_ordinary_hugging_face_model(
    tmp_path: Path, model_folder: Path, precision: dict[str, object]
) -> None:
    learner = make_learner(model_folder, precision)
    learner.train_step(make_batch(GROUPS), 2)
    learner.save(tmp_path / "actor")
    folder = tmp_path / "actor" / "huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    trained = weights(learner)
    assert {name for name, _ in loaded.named_parameters()} == trained.keys()
    for name, weight in loaded.named_parameters():
        assert weight.dtype == trained[name].dtype
        assert torch.equal(weight, trained[name])
    assert (folder / "tokenizer.json").is_file()


def test_only_files_are_copied_from_the_models_folder(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "tokenizer.model").symlink_to(folder / "blob_that_was_not_downloaded")
    (folder / "tokenizer").mkdir()
    make_learner(folder).save(tmp_path / "actor")
    saved = {file.name for file in (tmp_path / "actor" / "huggingface").iterdir()}
    assert "tokenizer.json" in saved
    assert not {"tokenizer.model", "tokenizer"} & saved


def test_a_rollback_multiplies_the_scheduled_learning_rate(
    tmp_path: Path, model_folder: Path
) -> None:
    learner = make_learner(model_folder)
    before = learner.train_step(make_batch(2), 2)["actor/lr"]
    assert before > 0
    learner.save(tmp_path / "actor")
    learner.load(tmp_path / "actor", 0.25)
    assert learner.train_step(make_batch(2), 2)["actor/lr"] == pytest.approx(0.25 * before)


def test_a_checkpoint_is_readable_for_everybody(tmp_path: Path, model_folder: Path) -> None:
    make_learner(model_folder).save(tmp_path / "actor")
    modes = {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.rglob("*.safetensors")}
    assert modes == {0o644}


def test_saving_before_any_step_can_be_resumed(tmp_path: Path, model_folder: Path) -> None:
    fresh = make_learner(model_folder)
    fresh.save(tmp_path / "actor")
    resumed = make_learner(model_folder)
    resumed.load(tmp_path / "actor")
    expected = fresh.train_step(make_batch(GROUPS), 2)
    assert (
        resumed.train_step(make_batch(GROUPS), 2)["actor/grad_norm"] == expected["actor/grad_norm"]
    )


@pytest.mark.parametrize("model_dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_run_resumes_with_another_dtype_of_weights_and_moments(
    tmp_path: Path, model_folder: Path, model_dtypes: tuple[str, str]
) -> None:
    saving, resumed = (
        make_learner(model_folder, {"model_dtype": one, "dtype": "bfloat16"})
        for one in model_dtypes
    )
    saving.train_step(make_batch(GROUPS), 2)
    saving.save(tmp_path / "actor")
    resumed.load(tmp_path / "actor")
    batch = make_batch(GROUPS, seed=1)
    after = [one.train_step(batch, 3)["actor/grad_norm"] for one in (saving, resumed)]
    assert after[0] == pytest.approx(after[1], rel=0.05)


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
        ("optimizer.index.json", b'{"files": [], "tensors": []}'),
        ("optimizer.index.json", b'{"files": [3], "tensors": {}}'),
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


def test_a_device_too_small_for_the_moments_is_no_damaged_checkpoint(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_folder)
    learner.train_step(make_batch(2), 1)
    learner.save(tmp_path / "actor")

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StateFiles, "fill", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        learner.load(tmp_path / "actor")


@pytest.mark.parametrize("owner", [StateFiles, Qwen3ForCausalLM])
def test_an_error_of_the_code_while_resuming_is_no_damaged_checkpoint(
    tmp_path: Path, model_folder: Path, owner: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_folder)
    learner.train_step(make_batch(2), 1)
    learner.save(tmp_path / "actor")

    def fails(*_: object, **__: object) -> None:
        raise TypeError("an argument too many")

    monkeypatch.setattr(owner, "fill" if owner is StateFiles else "from_pretrained", fails)
    with pytest.raises(TypeError, match="an argument too many"):
        learner.load(tmp_path / "actor")


@pytest.mark.parametrize("file", ["huggingface/model.safetensors", "optimizer.safetensors"])
def test_a_truncated_file_is_named_with_the_checkpoint_to_use_instead(
    tmp_path: Path, model_folder: Path, file: str
) -> None:
    learner = make_learner(model_folder)
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        write_checkpoint(store, step, learner.save, DataProgress(step))
    damaged = tmp_path / "global_step_2" / "actor" / file
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=rf"{file} .*resume_from_path=.*global_step_1"):
        store.latest()  # by its size
    with pytest.raises(CheckpointError, match=rf"{file} cannot be .*resume_from_path=.*_step_1"):
        learner.load(tmp_path / "global_step_2" / "actor")  # and by its content


Numbers = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def make_learner_ranks(parallel: ParallelContext, model: Path, actor: Path | None) -> Learner:
    config = make_config(model, optim={"lr": 1e-2, "lr_warmup_steps": 2, "eps": 1e-2})
    learner = Learner(config, parallel, total_steps=6)
    if actor is not None:
        learner.load(actor)
    return learner


def train(learner: Learner, steps: range) -> Numbers:
    metrics = [learner.train_step(make_batch(seed=step), step) for step in steps]
    return metrics, {name: weight.clone() for name, weight in learner.named_weights()}


def save_after_two(learner: Learner, folder: Path) -> None:
    train(learner, range(1, 3))
    learner.save(folder)


@pytest.fixture(scope="module")
def unbroken(model_folder: Path) -> Numbers:
    """Three steps of one rank."""
    ((metrics, weights),) = on_ranks(
        1,
        partial(make_learner_ranks, model=model_folder, actor=None),
        partial(train, steps=range(1, 4)),
    )
    return metrics, weights


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_resumes_with_another_number_of_ranks(
    tmp_path: Path, model_folder: Path, unbroken: Numbers, before: int, after: int
) -> None:
    actor = tmp_path / "global_step_2" / "actor"
    expected, weights = unbroken
    on_ranks(
        before,
        partial(make_learner_ranks, model=model_folder, actor=None),
        partial(save_after_two, folder=actor),
    )
    resumed = on_ranks(
        after,
        partial(make_learner_ranks, model=model_folder, actor=actor),
        partial(train, steps=range(3, 4)),
    )
    for found, found_weights in resumed:
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy"):
            assert [one[name] for one in found] == pytest.approx(
                [one[name] for one in expected[2:]], rel=1e-4, abs=1e-5
            ), name
        for name, weight in weights.items():
            torch.testing.assert_close(found_weights[name], weight, atol=1e-5, rtol=1e-5, msg=name)


CPU, XPU, CUDA = torch.device("cpu"), torch.device("xpu", 1), torch.device("cuda", 0)


class FakeGenerators:
    """``torch.xpu`` or its like: a state of each device."""

    def __init__(self) -> None:
        self.states: dict[torch.device, torch.Tensor] = {}

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return a device's state."""
        return self.states[device]

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Replace a device's state."""
        self.states[device] = state


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> FakeGenerators:
    fake = FakeGenerators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def test_any_accelerators_generator_continues_from_its_state(generators: FakeGenerators) -> None:
    generators.states[XPU] = torch.tensor([3, 0, 255], dtype=torch.uint8)
    saved = random_state(XPU)
    sampled = torch.rand(3)
    assert (set(saved), saved["xpu"]) == ({"cpu", "xpu"}, "0300ff")
    generators.states[XPU] = torch.zeros(3, dtype=torch.uint8)
    restore_random_state(saved, XPU)
    assert generators.states[XPU].tolist() == [3, 0, 255]
    assert torch.equal(torch.rand(3), sampled)


def test_a_checkpoint_of_another_type_of_device_gives_the_cpus_state_alone(
    generators: FakeGenerators,
) -> None:
    generators.states[CUDA] = torch.tensor([1], dtype=torch.uint8)
    saved = random_state(CUDA)
    sampled = torch.rand(3)
    generators.states.clear()
    for device in (XPU, CPU):
        restore_random_state(saved, device)
        assert torch.equal(torch.rand(3), sampled)
    assert not generators.states


def test_on_the_cpu_no_other_generator_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "get_device_module")
    assert set(random_state(CPU)) == {"cpu"}
