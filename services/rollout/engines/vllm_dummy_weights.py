"""A start without weights must not overwrite what no checkpoint holds.

vLLM's loader of dummy weights draws random numbers for buffers too: those that a model computes
from its configuration, such as the normalisation of pixels, would be lost for good.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["keep_buffers"]

_LOADER = "vllm.model_executor.model_loader.dummy_loader"
_MARK = "sluice_keeps_buffers"


def keep_buffers() -> None:
    """Has that loader leave buffers as they were made; to be called before a model is loaded.

    Does nothing without vLLM, or a second time.
    """
    try:
        loader: Any = importlib.import_module(_LOADER).DummyModelLoader
    except ImportError:
        return
    if hasattr(loader, _MARK):
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
