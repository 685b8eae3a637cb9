"""A start without weights must not overwrite what no checkpoint holds.

vLLM's loader of dummy weights draws random numbers for buffers too: those that a model computes
from its configuration, such as the normalisation of pixels, would be lost for good.
"""

from __future__ import annotations

import functools
from typing import Any

from services.rollout.engines.vllm_worker_features import dummy_loader

__all__ = ["keep_buffers"]

_MARK = "sluice_keeps_buffers"


def keep_buffers() -> None:
    """Has that loader leave buffers as they were made; to be called before a model is loaded.

    Does nothing a second time, nor without that loader, which `WorkerFeatures` refuses by name.
    """
    loader = dummy_loader()
    if loader is None or hasattr(loader, _MARK):
        return
    original = loader.load_weights

    @functools.wraps(original)
    def load_weights(self: Any, model: Any, model_config: Any) -> None:  # noqa: ANN401 - vLLM's
        made = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        original(self, model, model_config)
        for name, buffer in model.named_buffers():
            kept = made.get(name)
            if kept is not None and kept.shape == buffer.shape and kept.device == buffer.device:
                buffer.data.copy_(kept)

    loader.load_weights = load_weights
    setattr(loader, _MARK, True)
