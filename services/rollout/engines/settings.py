"""Settings that every engine reads, and those of vendors' engines."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from sluice.config.derived import max_model_len
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.errors import ConfigError

FILES_VERSION, FILES_DIGEST = 0, "files"
"""The policy version and digest of weights read from the model's files."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine.

    Attributes:
        model_path: directory with a Hugging Face configuration.
        trust_remote_code: run model code from the directory.
        device: ``cpu``, ``cuda``, ``cuda:N``, ``npu`` ...; ``None`` takes an accelerator, else CPU.
        dtype: of weights, cache and activations; the embedded engine's probabilities are float32.
        float32_head: compute logits in float32 too.
        slots: samples generated at once.
        max_model_len: prompt plus response tokens of a sample.
        max_queued: samples that may wait for a slot.
        torch_threads: intra-op threads on the CPU, of the embedded engine's step loop or of each
            of the vendor's processes; more than 1 slows tiny models down.
        weights_backend: backend of the weight transfer; ``None`` for the device's own.
        recompute_kv: after a weight swap, recompute the cache of running samples.
        serves_model_files: serve the weights in the directory as version 0; otherwise the trainer
            sends the first weights and no weight files are needed.
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
    def of(cls, config: RunConfig, **engine_fields: Any) -> Self:  # noqa: ANN401 - each has its own
        """Return the settings for a run configuration, with the engine's own fields."""
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
            **engine_fields,
        )


@dataclass(frozen=True, slots=True)
class VendorSettings(EngineSettings):
    """Settings of one vendor's engine.

    Attributes:
        arguments: arguments of the vendor's engine, by the vendor's names.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)


def with_engine_kwargs(
    arguments: Mapping[str, object], rollout: RolloutConfig, owner: str, reserved: Mapping[str, str]
) -> dict[str, object]:
    """Return `arguments`, overridden by `engine_kwargs`, without nulls (as in verl).

    Args:
        arguments: the rollout's keys by the vendor's names.
        rollout: holds `engine_kwargs`.
        owner: the vendor's name; in lower case it is the engine's, and the section's below
            `engine_kwargs`.
        reserved: names that users must not set, with what to do instead.

    Raises:
        ConfigError: `engine_kwargs` are no mapping, or set one of `reserved`.
    """
    name = owner.lower()
    section = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
    user_arguments = rollout.engine_kwargs.get(name) or {}
    if not isinstance(user_arguments, Mapping):
        raise ConfigError(
            f"{section} is {user_arguments!r}; give a mapping of {owner}'s engine arguments"
        )
    for key in user_arguments:
        if key in reserved:
            raise ConfigError(f"{section}.{key} cannot be set: {reserved[key]}")
    chosen = {**arguments, **{str(key): value for key, value in user_arguments.items()}}
    return {key: value for key, value in chosen.items() if value is not None}


def refuse_unknown(
    owner: str, version: str, arguments: Mapping[str, object], known_names: Container[str]
) -> None:
    """Raise ConfigError for engine arguments that this version of the vendor's engine lacks."""
    unknown = sorted(name for name in arguments if name not in known_names)
    if unknown:
        raise ConfigError(
            f"{owner} {version} has no engine arguments {', '.join(unknown)}; take them out of "
            f"actor_rollout_ref.rollout.engine_kwargs.{owner.lower()}"
        )


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first installed package; import nothing."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
