"""What sluice adds to each of vLLM's worker processes, where vLLM imports this module by name.

See `vendor.weight_worker` for how weights come.
"""

from __future__ import annotations

import functools
from typing import Any

from services.rollout.engines.vendor.owner_watch import end_with_owner
from services.rollout.engines.vendor.weight_worker import WeightWorker
from services.rollout.engines.vllm.worker_features import WorkerFeatures, dummy_loader

_MARK = "sluice_keeps_buffers"


def keep_buffers() -> None:
    """Make vLLM's dummy loader leave buffers as they were; call it before a model is loaded.

    Do nothing a second time, nor without that loader; `WorkerFeatures` refuses such a vLLM.
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


# vLLM imports this file before it loads the model, and calls nothing before that.
keep_buffers()
end_with_owner(with_parent=True)  # vLLM's engine process may not have imported anything of ours


class VllmWorker(WeightWorker):
    """Methods for vLLM's ``worker_extension_cls``."""

    sluice_features: WorkerFeatures | None = None

    def sluice_find_features(self) -> WorkerFeatures:
        """Return vLLM's model here. Raises ConfigError if this version lacks what is needed."""
        return WorkerFeatures(self)

    def sluice_pulse(self) -> int:
        """Return the samples held since the last step; answered in the engine's loop."""
        if self.sluice_features is None:
            raise RuntimeError("sluice_begin was not called")
        return self.sluice_features.num_samples()
