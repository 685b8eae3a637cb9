"""Which NPUs each process of a run on one machine gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.config.run import RunConfig
from sluice.device.ascend_environment import VISIBLE_VARIABLE
from sluice.device.ascend_host import device_numbers, launch_environment, wants_npu
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """NPUs of a run's processes, by the host's numbers; empty where a process takes none.

    Trainer ranks have the first ones, one each; replicas follow, in the order of their numbers.
    No two processes share one: HCCL takes an NPU for one rank of a group only.
    """

    numbers: Sequence[str]
    trainer_ranks: int
    devices_per_replica: int

    def of_rank(self, rank: int) -> str:
        """What ASCEND_RT_VISIBLE_DEVICES is for a trainer rank.

        Raises:
            ConfigError: there are too few.
        """
        return self._slice(rank, 1, f"trainer rank {rank}") if self.trainer_ranks else ""

    def of_replica(self, index: int) -> str:
        """The same for a replica.

        Raises:
            ConfigError: there are too few.
        """
        each = self.devices_per_replica
        first = self.trainer_ranks + index * each
        return self._slice(first, each, f"replica {index}") if each else ""

    def _slice(self, first: int, count: int, whose: str) -> str:
        taken = self.numbers[first : first + count]
        if len(taken) < count:
            raise ConfigError(
                f"{whose} would get NPU number {first + count} of {len(self.numbers)} "
                f"({', '.join(self.numbers) or 'none'}); lower trainer.n_gpus_per_node or "
                f"sluice.rollout.replicas, make more NPUs visible ({VISIBLE_VARIABLE}), or set "
                "sluice.rollout.device=cpu with sluice.weights.backend=gloo"
            )
        return ",".join(taken)


def device_share(config: RunConfig, given: Mapping[str, str]) -> DeviceShare:
    """How a run's processes share the NPUs that the launcher sees."""
    rollout = config.actor_rollout_ref.rollout
    each = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return DeviceShare(
        device_numbers(given),
        config.trainer.n_gpus_per_node if wants_npu(config.trainer.device, given) else 0,
        each if wants_npu(config.sluice.rollout.device, given) else 0,
    )


def rank_environment(config: RunConfig, rank: int, given: Mapping[str, str]) -> dict[str, str]:
    """A trainer rank's variables for its device, on top of `given`.

    Raises:
        ConfigError: there are fewer NPUs than the run takes.
    """
    visible = device_share(config, given).of_rank(rank)
    endpoint = config.sluice.trainer.endpoint
    return _with(visible, launch_environment(config, config.trainer.device, endpoint, given))


def replica_environment(config: RunConfig, index: int, given: Mapping[str, str]) -> dict[str, str]:
    """A replica's variables for its devices, on top of `given`.

    Raises:
        ConfigError: there are fewer NPUs than the run takes.
    """
    visible = device_share(config, given).of_replica(index)
    service = config.sluice.rollout
    return _with(visible, launch_environment(config, service.device, service.endpoint, given))


def _with(visible: str, environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, VISIBLE_VARIABLE: visible} if visible else dict(environment)
