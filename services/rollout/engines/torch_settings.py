"""What the embedded torch engine needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sluice.config.derived import batch_invariant, max_model_len
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

__all__ = ["TorchEngineSettings", "torch_settings"]


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """Settings of one `TorchEngine`.

    Attributes:
        model_path: directory with a Hugging Face configuration; weight files are not needed.
        trust_remote_code: run model code that ships with it.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``npu`` ...; ``None`` for what is there.
        dtype: of weights, cache and activations. Probabilities are always float32.
        slots: samples generated at once.
        max_model_len: prompt plus response tokens of a sample.
        max_queued: samples that may wait for a slot.
        torch_threads: intra-op threads of the step loop; more than 1 slows tiny models down.
        batch_invariant: a sample's tokens and logprobs do not depend on what else runs, to the bit.
        weights_backend: collectives that weights arrive by; ``None`` is the device's own.
        recompute_kv: after a weight swap, recompute the cache of running samples.
    """

    model_path: str
    trust_remote_code: bool = False
    device: str | None = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 256
    max_model_len: int = 2048
    max_queued: int = 4096
    torch_threads: int = 1
    batch_invariant: bool = False
    weights_backend: str | None = None
    recompute_kv: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "max_queued", "torch_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"torch engine: {name} is {getattr(self, name)}; give at least 1")
        if self.max_model_len < 2:
            raise ConfigError(
                f"torch engine: max_model_len is {self.max_model_len}; give at least 2, room for "
                "a prompt token and a response token"
            )


def torch_settings(config: RunConfig) -> TorchEngineSettings:
    """The part of a run configuration that concerns this engine."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    service = config.sluice.rollout
    return TorchEngineSettings(
        model_path=model.path,
        trust_remote_code=model.trust_remote_code,
        device=service.device,
        dtype=rollout.dtype,
        slots=rollout.max_num_seqs,
        max_model_len=max_model_len(config),
        max_queued=service.max_queued,
        torch_threads=service.torch_threads,
        batch_invariant=batch_invariant(config),
        weights_backend=config.sluice.weights.backend,
        recompute_kv=config.sluice.weights.recompute_kv,
    )
