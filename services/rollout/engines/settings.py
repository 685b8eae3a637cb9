"""Settings that every engine reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from sluice.config.derived import max_model_len
from sluice.config.run import RunConfig

FILES_VERSION, FILES_DIGEST = 0, "files"
"""The policy version and digest of weights that an engine reads from the model's files."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine.

    Attributes:
        model_path: directory with a Hugging Face configuration.
        trust_remote_code: run model code that ships with it.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``npu`` ...; ``None`` takes what the machine has.
        dtype: of weights, cache and activations; the embedded engine's probabilities are float32.
        float32_head: compute logits in float32 too.
        slots: samples generated at once.
        max_model_len: prompt plus response tokens of a sample.
        max_queued: samples that may wait for a slot.
        torch_threads: intra-op threads on the CPU, of the embedded engine's step loop or of each
            of the vendor's processes; more than 1 slows tiny models down.
        weights_backend: collectives that bring weights; ``None`` is the device's own.
        recompute_kv: after a weight swap, recompute the cache of running samples.
        serves_model_files: serve the weights of the directory's files as version 0; else no files
            of weights are needed, and the trainer sends the first weights.
    """

    model_path: str
    trust_remote_code: bool = False
    device: str | None = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    float32_head: bool = False
    slots: int = 256
    max_model_len: int = 2048
    max_queued: int = 4096
    torch_threads: int = 1
    weights_backend: str | None = None
    recompute_kv: bool = False
    serves_model_files: bool = False

    @classmethod
    def of(cls, config: RunConfig, **own: Any) -> Self:  # noqa: ANN401 - each engine's own fields
        """Return the settings for a run configuration, with `own` fields of the engine."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        service = config.sluice.rollout
        return cls(
            model_path=model.path,
            trust_remote_code=model.trust_remote_code,
            device=service.device,
            dtype=rollout.dtype,
            float32_head=model.float32_head,
            slots=rollout.max_num_seqs,
            max_model_len=max_model_len(config),
            max_queued=service.max_queued,
            torch_threads=service.torch_threads,
            weights_backend=config.sluice.weights.backend,
            recompute_kv=config.sluice.weights.recompute_kv,
            serves_model_files=service.serves_model_files,
            **own,
        )
