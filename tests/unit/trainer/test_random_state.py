"""Generators go on from a checkpoint on the type of device that it was written on."""

from __future__ import annotations

import pytest
import torch

from services.trainer.learner.model.trained_model import random_state, restore_random_state

CPU, XPU, CUDA = torch.device("cpu"), torch.device("xpu", 1), torch.device("cuda", 0)


class FakeGenerators:
    """``torch.xpu`` or its like: a state of each device."""

    def __init__(self) -> None:
        self.states: dict[torch.device, torch.Tensor] = {}

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """That of a device."""
        return self.states[device]

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Replace it."""
        self.states[device] = state


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> FakeGenerators:
    fake = FakeGenerators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def test_any_accelerators_generator_goes_on_where_it_was(generators: FakeGenerators) -> None:
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
