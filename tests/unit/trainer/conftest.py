"""What tests of the trainer share: no process group is left, and a kind of model is tried once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEARNER = "services.trainer.learner.learner"
_TRIED = set[tuple[object, ...]]()


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A learner that computes in another dtype than its weights' makes torch's process group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _a_kind_of_model_is_tried_on_packed_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each learner tries its model, for a third of the time of one that trains a step or two."""
    if (learner := sys.modules.get(_LEARNER)) is None:
        return
    check_packing = learner.check_packing

    def try_once(model: PreTrainedModel, dtype: object, naming: Any, share: object) -> None:
        weights = [(name, one.dtype, type(one)) for name, one in model.named_parameters()]
        kind = (type(model), model.config.to_json_string(), dtype, model.device, *weights)
        if share is not None or kind not in _TRIED:
            check_packing(model, dtype, naming, share)
            _TRIED.add(kind)

    monkeypatch.setattr(learner, "check_packing", try_once)
