"""Default deadlines for keys that are null, from the lengths, the model and the engine of a run."""

from __future__ import annotations

from sluice.config.derived import replica_devices
from sluice.config.memory.shape import find_shape
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES

# A group that every engine finishes in time unless it hangs: ten tokens a second for each sample.
_SECONDS_PER_TOKEN = 0.1
_MIN_GENERATE_S = 600.0
# Files of a model on a shared disk that many ranks read at once.
_READ_BYTES_PER_S = 0.25e9
_FILE_BYTES_PER_PARAMETER = 2
_START_S = 120.0
_COMPILING_START_S = 600.0
# A replica copies staged weights into its engine: the slowest path, from host memory in pieces.
_LOAD_BYTES_PER_S = 0.5e9


def generate_timeout_s(config: RunConfig) -> float:
    """Return how long a group's stream may last: by default 0.1 s per token, at least 600 s."""
    if (timeout_s := config.sluice.reward.generate_timeout_s) is not None:
        return timeout_s
    return max(_MIN_GENERATE_S, _SECONDS_PER_TOKEN * config.data.max_response_length)


def command_timeout_s(config: RunConfig) -> float:
    """Return how long ranks wait for each other: by default 120 s, and 4 s for each GB of weights.

    The ranks do not end loading at the same time.
    """
    if (timeout_s := config.sluice.trainer.command_timeout_s) is not None:
        return timeout_s
    return _START_S + _reading_s(config)


def replica_wait_timeout_s(config: RunConfig) -> float:
    """Return how long replicas may take to start.

    By default 120 s, 600 s for an engine that compiles, and 4 s more for each GB of weights.
    """
    if (timeout_s := config.sluice.trainer.replica_wait_timeout_s) is not None:
        return timeout_s
    return longest_start_s(config)


def longest_start_s(config: RunConfig) -> float:
    """Return how long a process may take until it serves or trains: 120 s, 600 s with an engine
    that compiles, and 4 s more for each GB of weights.
    """
    compiles = config.actor_rollout_ref.rollout.name in VENDOR_ENGINES
    return (_COMPILING_START_S if compiles else _START_S) + _reading_s(config)


def commit_timeout_s(config: RunConfig, wire_bytes: float) -> float:
    """Return how long a replica may take to bring staged weights into its engine.

    `sluice.weights.timeout_s`, and 2 s for each GB that one of its devices reads, its part of the
    weights.

    Args:
        wire_bytes: bytes of all weights, as sent.
    """
    read_bytes = wire_bytes / replica_devices(config)
    return config.sluice.weights.timeout_s + read_bytes / _LOAD_BYTES_PER_S


def _reading_s(config: RunConfig) -> float:
    shape = find_shape(config.actor_rollout_ref.model.path)
    parameters = 0 if shape is None else shape.total_parameters
    return parameters * _FILE_BYTES_PER_PARAMETER / _READ_BYTES_PER_S
