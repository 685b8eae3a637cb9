"""Settings that every vendor's engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from sluice.config.derived import max_model_len
from sluice.config.run import RunConfig
from sluice.config.schema.rollout import RolloutConfig
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientEngineSettings:
    """Settings of one engine.

    Attributes:
        model_path: directory with a Hugging Face configuration; weight files are not needed.
        trust_remote_code: run model code that ships with it.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``npu`` ...; ``None`` takes what the machine has.
        dtype: of weights, cache and activations.
        slots: samples generated at once.
        max_model_len: prompt plus response tokens of a sample.
        max_queued: samples that may wait for a slot.
        torch_threads: intra-op threads of the vendor's processes where they compute on the CPU.
        weights_backend: collectives that bring weights; ``None`` is the device's own.
        recompute_kv: after a weight swap, recompute the cache of running samples.
        arguments: of the vendor's engine, by its own names.
    """

    model_path: str
    trust_remote_code: bool = False
    device: str | None = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: int = 256
    max_model_len: int = 2048
    max_queued: int = 4096
    torch_threads: int = 1
    weights_backend: str | None = None
    recompute_kv: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, arguments: Mapping[str, object]) -> Self:
        """Return the part of a run configuration that concerns the engine."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        service = config.sluice.rollout
        return cls(
            model_path=model.path,
            trust_remote_code=model.trust_remote_code,
            device=service.device,
            dtype=rollout.dtype,
            slots=rollout.max_num_seqs,
            max_model_len=max_model_len(config),
            max_queued=service.max_queued,
            torch_threads=service.torch_threads,
            weights_backend=config.sluice.weights.backend,
            recompute_kv=config.sluice.weights.recompute_kv,
            arguments=arguments,
        )


def with_engine_kwargs(
    arguments: Mapping[str, object], rollout: RolloutConfig, owner: str, ours: Mapping[str, str]
) -> dict[str, object]:
    """Return `arguments`, overridden by `engine_kwargs`, without nulls (as in verl).

    Args:
        arguments: the rollout's keys by the vendor's names.
        rollout: holds `engine_kwargs`.
        owner: the vendor's name; in small letters it is the section of its `engine_kwargs`.
        ours: names that users must not set, with what to do instead.

    Raises:
        ConfigError: `engine_kwargs` are no mapping, or set one of `ours`.
    """
    name = owner.lower()
    section = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
    given = rollout.engine_kwargs.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section} is {given!r}; give a mapping of {owner}'s engine arguments")
    for key in given:
        if key in ours:
            raise ConfigError(f"{section}.{key} cannot be set: {ours[key]}")
    chosen = {**arguments, **{str(key): value for key, value in given.items()}}
    return {key: value for key, value in chosen.items() if value is not None}
