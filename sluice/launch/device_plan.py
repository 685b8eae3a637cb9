"""Divide the devices of a launch into those that train and those that generate, describe the split,
and assign devices to processes.

A launch that names one pool, as verl's do, is divided as `sluice plan` divides it. One GPU is
shared. A launch on CPUs stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.config.derived import replica_devices, sleeps_while_training, world_size
from sluice.config.device_split import (
    PLACEMENT_KEY,
    auto_split,
    device_split,
    is_colocated,
    named_split,
)
from sluice.config.loading.loader import KeySettings
from sluice.config.memory.devices import DeviceKind, device_kind
from sluice.config.memory.shape import ModelShape, find_shape, published_name, published_shape
from sluice.config.memory.training import guessed_memory, training_layout
from sluice.config.run import RunConfig, changed
from sluice.device import host
from sluice.device.ascend_environment import VISIBLE_VARIABLE
from sluice.device.host import device_numbers, launch_environment, wants_npu
from sluice.errors import ConfigError

_BACKEND_KEY = "sluice.weights.backend"
_UTILIZATION_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"
_SHARED_UTILIZATION = 0.5
"""Largest share of a shared GPU's memory for the engine, if the trainer's need is unknown."""
_MIN_UTILIZATION = 0.1
_USUAL_GIB = {"GPU": 80.0, "NPU": 64.0}
"""Memory of a device if no driver reports it."""
_SEVERAL_HOSTS = (
    "devices: one pool on several hosts is not divided at the start; divide it by sluice plan, "
    "and write its keys"
)
_VISIBLE = {"GPU": host.CUDA_VISIBLE_VARIABLE, "NPU": VISIBLE_VARIABLE}


@dataclass(frozen=True, slots=True)
class LaunchDevices:
    """The devices on which a launch trains and generates.

    Args:
        kind: ``GPU`` or ``NPU``.
        count: how many there are.
        are_elsewhere: they belong to a cluster, which may grow; this host's driver does not know
            them.
        by_node: devices per machine; empty if all are on one machine.
    """

    kind: str
    count: int
    are_elsewhere: bool = False
    by_node: tuple[int, ...] = ()

    @property
    def gib(self) -> float | None:
        """Memory of each device, GiB; ``None`` if no driver reports it."""
        return host.gpu_gib() if self.kind == "GPU" and not self.are_elsewhere else None

    def device(self) -> DeviceKind:
        """Return a device with this memory."""
        return device_kind(f"{self.gib or _USUAL_GIB[self.kind]:.1f}GB")

    def pool(self) -> tuple[str, ...]:
        """Return overrides for the largest pool of machines with equally many devices each."""
        sizes = sorted(self.by_node or (max(self.count, 1),), reverse=True)
        nodes = max(range(1, len(sizes) + 1), key=lambda count: count * sizes[count - 1])
        return (
            f"trainer.nnodes={nodes}",
            f"trainer.n_gpus_per_node={sizes[nodes - 1]}",
            f"{PLACEMENT_KEY}=auto",
        )


_ONE_GPU = LaunchDevices("GPU", 1)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A launch on its devices.

    Args:
        config: the configuration with the split.
        line: text for the user; empty if the launch does not train and generate on devices.
        shortage: why its devices do not suffice, with the remedy; empty if they do. Without a line
            no number of devices would.
        remedy: overrides that make them suffice; empty if there are none or none are needed.
        is_shared: trainer and replica share one GPU.
    """

    config: RunConfig
    line: str = ""
    shortage: str = ""
    remedy: tuple[str, ...] = ()
    is_shared: bool = False


def launch_devices(config: RunConfig, environment: Mapping[str, str]) -> LaunchDevices | None:
    """Return this host's devices; ``None`` unless both trainer and replicas compute on them."""
    for kind, share in (
        ("NPU", device_share(config, environment)),
        ("GPU", gpu_share(config, environment)),
    ):
        if kind == "GPU" and host.is_cpu_torch():
            continue  # processes fall back to the CPU
        if share.trainer_ranks and share.devices_per_replica:
            return LaunchDevices(kind, len(share.numbers))
    return None


def local_devices(
    config: RunConfig, settings: KeySettings, environment: Mapping[str, str]
) -> DevicePlan:
    """Plan a launch on this host."""
    devices = launch_devices(config, environment)
    if devices is None:
        return DevicePlan(config)
    if config.trainer.nnodes > 1:  # a trainer on several hosts starts elsewhere
        is_pool = is_colocated(config, settings)
        return DevicePlan(config, line=_SEVERAL_HOSTS if is_pool else "")
    plan = device_plan(config, settings, devices)
    if not (plan.shortage and plan.line):
        return plan
    shortage = f"{plan.shortage}, or make more visible ({_VISIBLE[devices.kind]})"
    return replace(plan, shortage=shortage)


def device_plan(config: RunConfig, settings: KeySettings, devices: LaunchDevices) -> DevicePlan:
    """Plan a launch on devices."""
    shape = _model_shape(config)
    if is_colocated(config, settings):
        device = devices.device()
        try:
            split = device_split(config, settings, shape, device)
        except ConfigError as error:
            return _plan_beside_pool(config, devices, str(error))
        reason = f"{PLACEMENT_KEY}={config.sluice.placement}"
        if config.sluice.placement == "auto":
            reason += f", {_basis(shape, device)}"
            if shape is not None and devices.gib is None:
                reason += " assumed; sluice plan counts whether they suffice"
        config = changed(config, split.overrides)
    elif (shared := _one_gpu_plan(config, settings, devices)) is not None:
        return shared
    else:
        split, reason = named_split(config), "as its keys name them"
    line = f"devices: {split.summary} ({reason})"
    num_wanted = split.trainer + split.rollout
    is_by_hand = config.sluice.weights.backend == "gloo" and devices.kind == "GPU"
    if num_wanted <= devices.count or (is_by_hand and devices.count):
        return DevicePlan(config, line)
    remedy, advice = _remedy(config, shape, devices)
    takes = (
        f"the launch takes {num_wanted} {devices.kind}s ({split.summary}), {devices.count} are "
        "there"
    )
    return DevicePlan(config, line, f"{takes}; {advice}", remedy)


def _plan_beside_pool(config: RunConfig, devices: LaunchDevices, error: str) -> DevicePlan:
    """Return a launch that cannot be divided, with replicas beside its pool if they fit."""
    replicas = (devices.count - world_size(config)) // replica_devices(config)
    if replicas < 1:
        return DevicePlan(config, shortage=error)
    remedy = f"sluice.rollout.replicas={replicas}"
    shortage = f"{error}, or set {remedy}, whose devices are beside the trainer's"
    return DevicePlan(config, shortage=shortage, remedy=(remedy,))


def _one_gpu_plan(
    config: RunConfig, settings: KeySettings, devices: LaunchDevices
) -> DevicePlan | None:
    """Return the plan of a trainer and a replica on the only GPU; ``None``: they have more, or
    take more. NCCL accepts a GPU for one rank of a group only.
    """
    backend, replicas = config.sluice.weights.backend, config.sluice.rollout.replicas
    takes = (world_size(config), replica_devices(config), min(replicas, 1))
    has_one_gpu = replace(devices, are_elsewhere=False, by_node=()) == _ONE_GPU
    if not has_one_gpu or takes != (1, 1, 1) or backend not in (None, "gloo"):
        return None
    if backend is None and devices.are_elsewhere:
        return None  # the cluster may grow
    rollout = config.actor_rollout_ref.rollout
    requested_share, num_requested = rollout.gpu_memory_utilization, replicas
    if backend is None:  # else a user, or a start before this one, has set all of them
        replicas = 1
        one_replica = ("sluice.rollout.replicas=1", "sluice.trainer.min_replicas=1")
        config = changed(config, (*one_replica, f"{_BACKEND_KEY}=gloo"))
        utilization = min(requested_share, _engine_memory_share(config, devices.device()))
        config = changed(config, (f"{_UTILIZATION_KEY}={utilization:.2f}",))
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    memory = "" if rollout.name == "torch" else f", {share:.0%} of its memory for the engine"
    if memory and share < requested_share and settings.is_set(_UTILIZATION_KEY):
        memory += f" instead of {requested_share:.0%}"
    memory += " while the trainer does not train" if sleeps_while_training(config) else ""
    lowered = f", replicas {num_requested} -> {replicas}" if num_requested != replicas else ""
    line = (
        f"devices: the trainer and {replicas} replica{'' if replicas == 1 else 's'} share one GPU "
        f"({_BACKEND_KEY}=gloo{memory}{lowered})"
    )
    return DevicePlan(config, line, is_shared=True)


def _engine_memory_share(config: RunConfig, device: DeviceKind) -> float:
    """Return the share of a device's memory that a trainer leaves to an engine, by a guess.

    Beside an engine that sleeps in an update, the trainer holds weights, gradients and moments.
    """
    shape = _model_shape(config)
    if shape is None:
        return _SHARED_UTILIZATION
    guess = guessed_memory(shape, training_layout(config))
    trainer_bytes = guess.state if sleeps_while_training(config) else guess.peak
    return max(_MIN_UTILIZATION, (device.usable_bytes - trainer_bytes) / device.size)


def _remedy(
    config: RunConfig, shape: ModelShape | None, devices: LaunchDevices
) -> tuple[tuple[str, ...], str]:
    """Return overrides for the devices that are there, and advice that names them."""
    try:
        split = auto_split(changed(config, devices.pool()), shape, devices.device())
    except ConfigError:
        per_replica = replica_devices(config)
        if devices == _ONE_GPU and per_replica == 1:
            override = ("trainer.n_gpus_per_node=1",)
            return override, f"set {override[0]}, with which trainer and replica share the GPU"
        may_share = devices.kind == "GPU" and not devices.are_elsewhere and per_replica == 1
        sharding = config.actor_rollout_ref.actor.fsdp_config
        ranks = sharding.tensor_parallel_size * sharding.pipeline_parallel_size
        min_devices = 1 if may_share and ranks == 1 else ranks + per_replica
        trainer = "a trainer" if ranks == 1 else f"a trainer of {ranks}"
        return (), f"{trainer} and a replica of {per_replica} take at least {min_devices}"
    enough = split.trainer + split.rollout
    return split.overrides, f"{enough} would do with {' '.join(split.overrides)}"


def _basis(shape: ModelShape | None, device: DeviceKind) -> str:
    if shape is None:
        return "half each: the model's shape is not known"
    return f"fastest by estimate for devices of {device.gib:g} GiB"


def _model_shape(config: RunConfig) -> ModelShape | None:
    """Return the model's shape, from its folder or as a published model."""
    path = config.actor_rollout_ref.model.path
    shape = find_shape(path)
    if shape is None and published_name(path) is not None:
        return published_shape(path)
    return shape


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The devices of a run's processes, by the numbers that the vendor's variable takes.

    Trainer ranks have the first ones, one each; replicas follow, in the order of their numbers.
    No two processes share a device if there are enough: HCCL and NCCL accept a device for only one
    rank of a group.
    """

    numbers: Sequence[str]
    trainer_ranks: int
    devices_per_replica: int

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """Return a trainer rank's devices; fewer than it takes if there are no more."""
        return self._slice(rank, 1) if self.trainer_ranks else ()

    def of_replica(self, index: int) -> tuple[str, ...]:
        """Return a replica's devices; fewer than it takes if there are no more."""
        count = self.devices_per_replica
        return self._slice(self.trainer_ranks + index * count, count)

    def num_wanted(self, replicas: int) -> int:
        """Return the number of devices that all trainer ranks and `replicas` replicas take."""
        return self.trainer_ranks + replicas * self.devices_per_replica

    def beside_trainer(self) -> int:
        """Return how many replicas have separate devices beside the trainer."""
        return max(0, len(self.numbers) - self.trainer_ranks) // max(self.devices_per_replica, 1)

    def _slice(self, first: int, count: int) -> tuple[str, ...]:
        return tuple(self.numbers[first : first + count])


def device_share(config: RunConfig, environment: Mapping[str, str]) -> DeviceShare:
    """Share the NPUs that the launcher sees among a run's processes."""
    return DeviceShare(
        device_numbers(environment),
        config.trainer.n_gpus_per_node if wants_npu(config.trainer.device, environment) else 0,
        replica_devices(config) if wants_npu(config.sluice.rollout.device, environment) else 0,
    )


def gpu_share(config: RunConfig, environment: Mapping[str, str]) -> DeviceShare:
    """Share its GPUs; share none if a key names one, since another process could get it as well."""
    trainer, rollout = config.trainer.device, config.sluice.rollout.device
    if any((key or "").startswith("cuda:") for key in (trainer, rollout)):
        return DeviceShare((), 0, 0)
    return DeviceShare(
        host.gpu_numbers(environment),
        config.trainer.n_gpus_per_node if host.wants_gpu(trainer, environment) else 0,
        replica_devices(config) if host.wants_gpu(rollout, environment) else 0,
    )


def rank_environment(
    config: RunConfig, rank: int, base_environment: Mapping[str, str]
) -> dict[str, str]:
    """Return a trainer rank's variables for its device, on top of `base_environment`.

    Raises:
        ConfigError: there are fewer NPUs than the run takes, or it names one by its number.
    """
    device, endpoint = config.trainer.device, config.sluice.trainer.endpoint
    _refuse_number("trainer.device", device)
    npus = device_share(config, base_environment)
    environment = launch_environment(config, device, endpoint, base_environment)
    environment |= _npu_variables(
        npus, npus.of_rank(rank), min(npus.trainer_ranks, 1), f"rank {rank}"
    )
    return environment | _gpu_variables(
        config, gpu_share(config, base_environment).of_rank(rank), 1, base_environment
    )


def replica_environment(
    config: RunConfig, index: int, base_environment: Mapping[str, str]
) -> dict[str, str]:
    """Return a replica's variables for its devices, on top of `base_environment`.

    Raises:
        ConfigError: there are fewer NPUs than the run takes, or it names one by its number; or the
            replica comes to those of the configuration, and no GPU is left for it.
    """
    device, endpoint = config.sluice.rollout.device, config.sluice.rollout.endpoint
    _refuse_number("sluice.rollout.device", device)
    npus, gpus = device_share(config, base_environment), gpu_share(config, base_environment)
    environment = launch_environment(config, device, endpoint, base_environment)
    count = npus.devices_per_replica
    environment |= _npu_variables(npus, npus.of_replica(index), count, f"replica {index}")
    if index >= config.sluice.rollout.replicas:
        _refuse_occupied(config, gpus, index)
    return environment | _gpu_variables(
        config, gpus.of_replica(index), gpus.devices_per_replica, base_environment
    )


def _refuse_occupied(config: RunConfig, gpus: DeviceShare, index: int) -> None:
    """Refuse a replica that would take a GPU of another process, which only gloo permits."""
    num_left, count = len(gpus.of_replica(index)), gpus.devices_per_replica
    by_hand = config.sluice.weights.backend == "gloo" or host.is_cpu_torch()
    if gpus.numbers and num_left < count and not by_hand:
        raise ConfigError(
            f"replica {index} would take {count} GPU(s) of its own, but of {len(gpus.numbers)} "
            f"({', '.join(gpus.numbers)}) {num_left} are left for it; scale to at most "
            f"{gpus.beside_trainer()}, wait until a replica has left, or start with more GPUs "
            f"({host.CUDA_VISIBLE_VARIABLE})"
        )


def _refuse_number(key: str, device: str | None) -> None:
    """Refuse a numbered NPU: a process takes the first one that the launcher gives it."""
    kind, colon, number = (device or "").partition(":")
    if kind == "npu" and colon:
        raise ConfigError(
            f"{key}={device}: a process that this command starts sees only the NPUs that it is "
            f"given; set {key}=npu, and {VISIBLE_VARIABLE} to the NPUs of the run ({number} first)"
        )


def _npu_variables(
    share: DeviceShare, numbers: Sequence[str], count: int, process: str
) -> dict[str, str]:
    if len(numbers) < count:
        raise ConfigError(
            f"{process} would take {count} NPU(s) of its own, but of {len(share.numbers)} "
            f"({', '.join(share.numbers) or 'none'}) {len(numbers)} are left for it; lower "
            "trainer.n_gpus_per_node or sluice.rollout.replicas, make more NPUs visible "
            f"({VISIBLE_VARIABLE}), or set sluice.rollout.device=cpu with "
            "sluice.weights.backend=gloo"
        )
    return {VISIBLE_VARIABLE: ",".join(numbers)} if numbers else {}


def _gpu_variables(
    config: RunConfig, numbers: Sequence[str], count: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Share GPUs; if there are too few, every process sees all, as without a launcher."""
    share = gpu_share(config, environment)
    is_enough = len(share.numbers) >= share.num_wanted(config.sluice.rollout.replicas)
    if not numbers or len(numbers) < count or not is_enough:
        return {}
    return {host.CUDA_VISIBLE_VARIABLE: ",".join(numbers)}
