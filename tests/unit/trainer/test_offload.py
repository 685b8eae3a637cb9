"""Moments and activations in host memory change no number and leave the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.trainer.learner.learner import Learner, TensorSet
from services.trainer.learner.model import optimizer as optimizer_module
from services.trainer.learner.ranks import DataParallel
from tests.support.tiny_policy import make_batch, make_config, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_PART_BYTES", 10_000)


def make_learner(folder: Path, **precision: object) -> Learner:
    config = make_config(folder, fsdp_config={"dtype": "float32", **precision})
    return Learner(config, DataParallel(), total_steps=10)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


def moment_bytes(learner: Learner) -> Iterator[int]:
    """Of each moment on the device."""
    for state in learner._optimizer._adamw.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            local = moment.to_local() if hasattr(moment, "to_local") else moment
            yield local.untyped_storage().nbytes()


@pytest.mark.parametrize("passes", ["float32", "bfloat16"])  # bfloat16 has sharded parameters
def test_moments_on_the_host_give_the_same_weights_and_checkpoints(
    folder: Path, tmp_path: Path, passes: str
) -> None:
    usual = make_learner(folder, dtype=passes)
    offloaded = make_learner(folder, dtype=passes, optimizer_offload=True)
    for step in (1, 2):
        for learner in (usual, offloaded):
            learner.train_step(make_batch(seed=step), step)
        assert set(moment_bytes(offloaded)) == {0}
        assert min(moment_bytes(usual)) > 0
    for learner in (usual, offloaded):
        learner.save(tmp_path / str(learner is usual) / "actor")
    found, expected = (dict(one.gather(TensorSet.MOMENTS)) for one in (offloaded, usual))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    resumed = make_learner(folder, dtype=passes, optimizer_offload=True)
    resumed.load(tmp_path / "True" / "actor")
    assert set(moment_bytes(resumed)) == {0}
    for learner in (usual, offloaded, resumed):
        learner.train_step(make_batch(seed=3), 3)
    assert set(moment_bytes(offloaded)) == {0}
    expected = weights(usual)
    for learner in (offloaded, resumed):
        found = weights(learner)
        assert all(torch.equal(found[name], one) for name, one in expected.items())
