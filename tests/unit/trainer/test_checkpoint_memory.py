"""What the CPU holds while a sharded model is written: the weights, then the moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from services.trainer.learner.model.optimizer import PolicyOptimizer
from services.trainer.learner.model.trained_model import save_policy_state
from sluice.config.schema.actor import OptimConfig
from tests.support.tiny_policy import make_model


def test_whole_weights_are_given_up_before_the_moments_come(tmp_path: Path) -> None:
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = PolicyOptimizer(parameters, OptimConfig(), total_steps=1)
    held: list[StorageWeakRef] = []
    alive: list[bool] = []

    @contextmanager
    def weights() -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        def whole() -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in parameters.items():
                copy = parameter.detach().clone()
                held.append(StorageWeakRef(copy.untyped_storage()))
                yield name, copy

        yield whole()

    @contextmanager
    def moments() -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        alive.extend(not one.expired() for one in held)
        yield iter(optimizer.state_tensors().items())

    save_policy_state(tmp_path, model, optimizer, "", weights=weights, moments=moments)
    assert len(alive) == len(parameters)
    assert not any(alive)
