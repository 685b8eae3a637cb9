"""The NPUs or GPUs of each process of a run on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.config.derived import replica_devices
from sluice.config.run import RunConfig
from sluice.device import host
from sluice.device.ascend_environment import VISIBLE_VARIABLE
from sluice.device.host import device_numbers, launch_environment, wants_npu
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The devices of a run's processes, by the numbers that the vendor's variable takes.

    Trainer ranks have the first ones, one each; replicas follow, in the order of their numbers.
    No two processes share one if there are enough: HCCL and NCCL take a device for one rank of a
    group only.
    """

    numbers: Sequence[str]
    trainer_ranks: int
    devices_per_replica: int

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """Return a trainer rank's threads; fewer than it takes if there are no more."""
        return self._slice(rank, 1) if self.trainer_ranks else ()

    def of_replica(self, index: int) -> tuple[str, ...]:
        """Return a replica's threads; fewer than it takes if there are no more."""
        each = self.devices_per_replica
        return self._slice(self.trainer_ranks + index * each, each)

    def wanted(self, replicas: int) -> int:
        """Return the devices that all trainer ranks and so many replicas take."""
        return self.trainer_ranks + replicas * self.devices_per_replica

    def beside_trainer(self) -> int:
        """Return how many replicas have devices of their own beside the trainer."""
        return max(0, len(self.numbers) - self.trainer_ranks) // max(self.devices_per_replica, 1)

    def _slice(self, first: int, count: int) -> tuple[str, ...]:
        return tuple(self.numbers[first : first + count])


def device_share(config: RunConfig, given: Mapping[str, str]) -> DeviceShare:
    """Share the NPUs that the launcher sees among a run's processes."""
    return DeviceShare(
        device_numbers(given),
        config.trainer.n_gpus_per_node if wants_npu(config.trainer.device, given) else 0,
        replica_devices(config) if wants_npu(config.sluice.rollout.device, given) else 0,
    )


def gpu_share(config: RunConfig, given: Mapping[str, str]) -> DeviceShare:
    """Share its GPUs; share none if a key names one, since another process could get it as well."""
    trainer, rollout = config.trainer.device, config.sluice.rollout.device
    if any((key or "").startswith("cuda:") for key in (trainer, rollout)):
        return DeviceShare((), 0, 0)
    return DeviceShare(
        host.gpu_numbers(given),
        config.trainer.n_gpus_per_node if host.wants_gpu(trainer, given) else 0,
        replica_devices(config) if host.wants_gpu(rollout, given) else 0,
    )


def rank_environment(config: RunConfig, rank: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return a trainer rank's variables for its device, on top of `given`.

    Raises:
        ConfigError: there are fewer NPUs than the run takes, or it names one by its number.
    """
    device, endpoint = config.trainer.device, config.sluice.trainer.endpoint
    _refuse_number("trainer.device", device)
    npus = device_share(config, given)
    environment = launch_environment(config, device, endpoint, given)
    environment |= _npus(npus, npus.of_rank(rank), min(npus.trainer_ranks, 1), f"rank {rank}")
    return environment | _gpus(config, gpu_share(config, given).of_rank(rank), 1, given)


def replica_environment(config: RunConfig, index: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return a replica's variables for its devices, on top of `given`.

    Raises:
        ConfigError: there are fewer NPUs than the run takes, or it names one by its number.
    """
    device, endpoint = config.sluice.rollout.device, config.sluice.rollout.endpoint
    _refuse_number("sluice.rollout.device", device)
    npus, gpus = device_share(config, given), gpu_share(config, given)
    environment = launch_environment(config, device, endpoint, given)
    each = npus.devices_per_replica
    environment |= _npus(npus, npus.of_replica(index), each, f"replica {index}")
    return environment | _gpus(config, gpus.of_replica(index), gpus.devices_per_replica, given)


def _refuse_number(key: str, device: str | None) -> None:
    """Refuse a numbered NPU: a process takes the first one that the launcher gives it."""
    kind, colon, number = (device or "").partition(":")
    if kind == "npu" and colon:
        raise ConfigError(
            f"{key}={device}: a process that this command starts sees only the NPUs that it is "
            f"given; set {key}=npu, and {VISIBLE_VARIABLE} to the NPUs of the run ({number} first)"
        )


def _npus(share: DeviceShare, taken: Sequence[str], count: int, whose: str) -> dict[str, str]:
    if len(taken) < count:
        raise ConfigError(
            f"{whose} would take {count} NPU(s) of its own, but of {len(share.numbers)} "
            f"({', '.join(share.numbers) or 'none'}) {len(taken)} are left for it; lower "
            "trainer.n_gpus_per_node or sluice.rollout.replicas, make more NPUs visible "
            f"({VISIBLE_VARIABLE}), or set sluice.rollout.device=cpu with "
            "sluice.weights.backend=gloo"
        )
    return {VISIBLE_VARIABLE: ",".join(taken)} if taken else {}


def _gpus(
    config: RunConfig, taken: Sequence[str], count: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Share GPUs; if there are too few, every process sees all, as without a launcher."""
    share = gpu_share(config, given)
    is_enough = len(share.numbers) >= share.wanted(config.sluice.rollout.replicas)
    if not taken or len(taken) < count or not is_enough:
        return {}
    return {host.CUDA_VISIBLE_VARIABLE: ",".join(taken)}
