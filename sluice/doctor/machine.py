"""Check the machine: CPUs, memory, open files, NPUs and GPUs, against what the run's processes
take.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.config.memory.layouts import own_training_layout, rollout_layout
from sluice.config.memory.rollout import rollout_memory
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import training_memory
from sluice.device.ascend_checks import AscendDemand, AscendHost, ascend_findings
from sluice.device.host import (
    CUDA_VISIBLE_VARIABLE,
    ascend_host,
    has_torch_npu,
    wants_gpu,
    wants_npu,
)
from sluice.doctor.finding import GIB, MIB, Examined, Finding, fine, gib, problem, warning
from sluice.launch.device_share import DeviceShare, device_share, gpu_share

# Trainer and replicas work by turns for a part of the time, so some sharing costs nothing.
MOST_THREADS_A_CPU = 2
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_OLD_QUOTA = tuple(Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """Threads that may run at once.

    Attributes:
        cpus: that this process may use; a container's quota may be a fraction.
        trainer: of all ranks that compute on the CPU.
        replicas: of all replicas that do.
        scorers: processes that grade.
    """

    cpus: float
    trainer: int
    replicas: int
    scorers: int


def check_threads(examined: Examined) -> Iterator[Finding]:
    """What computes on a device takes one CPU a process to drive it."""
    config, given = examined.config, examined.environment
    services, ranks = config.sluice, config.trainer.n_gpus_per_node

    def on_device(name: str | None) -> bool:
        return wants_gpu(name, given) or wants_npu(name, given)

    trainer = 1 if on_device(config.trainer.device) else services.trainer.torch_threads
    replica = 1 if on_device(services.rollout.device) else services.rollout.torch_threads
    yield from thread_findings(
        ThreadFacts(
            available_cpus(),
            trainer * ranks,
            replica * services.rollout.replicas,
            config.reward.scorer_pool.num_workers,
        )
    )


def thread_findings(facts: ThreadFacts) -> Iterator[Finding]:
    """Whether they share CPUs too much."""
    threads = facts.trainer + facts.replicas + facts.scorers
    what = (
        f"{facts.cpus:g} CPUs for {facts.trainer} threads of the trainer, {facts.replicas} of "
        f"replicas, {facts.scorers} scorer(s)"
    )
    if threads <= MOST_THREADS_A_CPU * facts.cpus:
        yield fine(what)
    else:
        yield warning(
            what,
            "threads that take turns wait for each other at every step, and heartbeats may be late",
            "lower sluice.rollout.replicas, trainer.n_gpus_per_node or the torch_threads of "
            "sluice.trainer and sluice.rollout",
        )


def available_cpus() -> float:
    """Those of the affinity mask, or a container's quota if that is less."""
    cpus = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError, ZeroDivisionError):  # "max": no quota
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        cpus = min(cpus, int(quota) / int(period))
    with suppress(OSError, ValueError, ZeroDivisionError):
        old, span = (int(file.read_text(encoding="ascii")) for file in _OLD_QUOTA)
        cpus = min(cpus, old / span) if old > 0 else cpus
    return cpus


# What a process takes before it holds a model: torch, and the vendor's libraries on a device.
BARE_BYTES, BARE_ON_DEVICE_BYTES = GIB // 2, 3 * GIB
# The trainer's two snapshots take turns; a replica holds the base of changes and what it is staged.
COPIES = 2
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Where a container's memory is told; `reclaimable`: of its statistics, cached files."""

    limit: str
    used: str
    statistics: str
    reclaimable: re.Pattern[str]


_CGROUPS = (
    _CgroupFiles(
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/memory.current",
        "sys/fs/cgroup/memory.stat",
        re.compile(r"^inactive_file (\d+)$", re.MULTILINE),
    ),
    _CgroupFiles(
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
        re.compile(r"^total_inactive_file (\d+)$", re.MULTILINE),
    ),
)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """What some processes take, bytes: bare and with their weights; with all that they may hold."""

    name: str
    at_least: float
    at_most: float


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """`available`: bytes, ``None`` if it is not known; `needed`: by what takes it."""

    available: int | None
    needed: tuple[MemoryPart, ...]


def check_memory(examined: Examined) -> Iterator[Finding]:
    """An estimate: what lies on devices is `sluice config check --device-memory`'s."""
    if examined.shape is None:
        yield warning(
            "how much memory the model takes cannot be said",
            "its config.json is not here",
            "give actor_rollout_ref.model.path a folder of this machine",
        )
        return
    yield from memory_findings(MemoryFacts(available_bytes(), needed(examined, examined.shape)))


def memory_findings(facts: MemoryFacts) -> Iterator[Finding]:
    """Whether it is enough."""
    parts = ", ".join(f"{one.name} {gib(one.at_most)}" for one in facts.needed)
    whole = sum(one.at_most for one in facts.needed)
    if facts.available is None:
        yield fine(f"up to {gib(whole)} needed ({parts}); what is free is not known")
    elif whole <= facts.available:
        yield fine(f"{gib(facts.available)} free, up to {gib(whole)} needed ({parts})")
    else:
        is_hopeless = sum(one.at_least for one in facts.needed) > facts.available
        report = problem if is_hopeless else warning
        yield report(
            f"{gib(facts.available)} of memory free, and up to {gib(whole)} needed ({parts})",
            "the kernel kills the process that asks for the rest",
            "lower sluice.rollout.replicas or the token budgets "
            "(actor_rollout_ref.actor.ppo_max_token_len_per_gpu, "
            "actor_rollout_ref.rollout.max_num_seqs), or take a larger machine or model dtype "
            "bfloat16",
        )


def needed(examined: Examined, shape: ModelShape) -> tuple[MemoryPart, ...]:
    """Of this host's trainer ranks, replicas and scorers."""
    config = examined.config
    ranks, replicas = config.trainer.n_gpus_per_node, config.sluice.rollout.replicas
    rank, replica = _rank(examined, shape), _replica(examined, shape)
    snapshots = COPIES * shape.total_parameters * own_training_layout(config).master_bytes
    return (
        MemoryPart(
            f"{ranks} trainer rank(s)",
            ranks * rank.at_least,
            ranks * rank.at_most + snapshots,
        ),
        MemoryPart(
            f"{replicas} replica(s)", replicas * replica.at_least, replicas * replica.at_most
        ),
        MemoryPart("reward service", BARE_BYTES, BARE_BYTES),
    )


def _rank(examined: Examined, shape: ModelShape) -> MemoryPart:
    if _is_on_device(examined.config.trainer.device, examined):
        return MemoryPart("", BARE_ON_DEVICE_BYTES, BARE_ON_DEVICE_BYTES)
    held = training_memory(shape, own_training_layout(examined.config))
    state = held.parameters + held.gradients + held.optimizer
    return MemoryPart("", BARE_BYTES + state, BARE_BYTES + held.update)


def _replica(examined: Examined, shape: ModelShape) -> MemoryPart:
    layout = rollout_layout(examined.config, examined.settings)
    staged = COPIES * shape.total_parameters * layout.weight_bytes
    if _is_on_device(examined.config.sluice.rollout.device, examined):
        return MemoryPart("", BARE_ON_DEVICE_BYTES, BARE_ON_DEVICE_BYTES + staged)
    held = rollout_memory(shape, layout, None)
    cache = held.activations + held.kv_of_all_sequences
    return MemoryPart("", BARE_BYTES + held.weights, BARE_BYTES + held.weights + staged + cache)


def available_bytes(root: Path = Path("/")) -> int | None:
    """What new processes may take: the kernel's estimate, or less in a container with a limit.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    found: list[int] = []
    with suppress(OSError):
        match = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="ascii"))
        found += [int(match[1]) * 1024] if match else []
    for files in _CGROUPS:
        with suppress(OSError, ValueError):  # "max": none
            limit, used = (_number(root / name) for name in (files.limit, files.used))
            found.append(max(0, limit - used + _reclaimable(root, files)))
    return min(found, default=None)


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def _reclaimable(root: Path, files: _CgroupFiles) -> int:
    """Files that were read or copied lately count as used, and give way to who asks for memory."""
    with suppress(OSError):
        match = files.reclaimable.search((root / files.statistics).read_text(encoding="ascii"))
        return int(match[1]) if match else 0
    return 0


def _is_on_device(name: str | None, examined: Examined) -> bool:
    given = examined.environment
    return wants_gpu(name, given) or wants_npu(name, given)


FOLDER = "/dev/shm"  # noqa: S108 - its size is read; nothing is written
# The queue between vLLM's workers takes most of it, NCCL's buffers between neighbours the rest.
EACH_BYTES, LEAST_BYTES = 256 * MIB, GIB


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """`total_bytes` and `free_bytes` of /dev/shm, ``None`` without it; processes on devices."""

    total_bytes: int | None
    free_bytes: int
    num_device_processes: int


def check_shared_memory(examined: Examined) -> Iterator[Finding]:
    """Containers have 64 MiB unless they are told otherwise."""
    total, free = _size()
    return shared_memory_findings(SharedMemoryFacts(total, free, device_processes(examined)))


def shared_memory_findings(facts: SharedMemoryFacts) -> Iterator[Finding]:
    """Whether it is enough."""
    count = facts.num_device_processes
    needed = max(LEAST_BYTES, count * EACH_BYTES) if count else 0
    if not needed:
        size = "none" if facts.total_bytes is None else gib(facts.total_bytes)
        yield fine(f"{FOLDER}: {size}; processes on the CPU use none of it")
        return
    there = "is missing"
    if facts.total_bytes is not None:
        there = f"has {gib(facts.free_bytes)} free of {gib(facts.total_bytes)}"
    if facts.free_bytes >= needed:
        yield fine(f"{FOLDER} {there}")
    else:
        yield warning(
            f"{FOLDER} {there}, and {count} processes on devices may take {gib(needed)}",
            "NCCL and engines of several processes end with a bus error where it is full",
            f"start the container with --shm-size={-(-needed // GIB)}g (shm_size in Compose, an "
            "emptyDir with medium Memory in Kubernetes), or enlarge it: mount -o "
            f"remount,size={-(-needed // GIB)}g {FOLDER}",
        )


def device_processes(examined: Examined) -> int:
    """Processes of the run that compute on a GPU or NPU of this machine."""
    config, replicas = examined.config, examined.config.sluice.rollout.replicas
    shares = (share(config, examined.environment) for share in (gpu_share, device_share))
    return sum(one.trainer_ranks + replicas * one.devices_per_replica for one in shares)


def _size() -> tuple[int | None, int]:
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return None, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


# Libraries, logs, data files, the ledger, pipes to scorers.
_OWN = 256
# A replica: two channels, a stream a group, its rank in a transfer group.
_EACH_REPLICA = 16


@dataclass(frozen=True, slots=True)
class OpenFilesFacts:
    """`soft`: what holds; `hard`: what a process may raise it to; -1: no limit."""

    soft: int
    hard: int
    replicas: int
    client_calls: int


def check_open_files(examined: Examined) -> Iterator[Finding]:
    """The limit of this shell, which the services inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits, services = examined.config.sluice.limits, examined.config.sluice
    calls = limits.max_submit_streams + limits.max_watchers
    return open_files_findings(OpenFilesFacts(soft, hard, services.rollout.replicas, calls))


def open_files_findings(facts: OpenFilesFacts) -> Iterator[Finding]:
    """Whether it is enough for the busiest service, with all clients that it admits."""
    needed = _OWN + _EACH_REPLICA * facts.replicas + facts.client_calls
    if facts.soft == -1 or facts.soft >= needed:
        limit = "no limit" if facts.soft == -1 else facts.soft
        yield fine(f"ulimit -n: {limit}; {needed} are enough")
        return
    can_raise = facts.hard == -1 or facts.hard >= needed
    yield warning(
        f"ulimit -n is {facts.soft}, and {needed} may be needed with {facts.replicas} replicas and "
        f"{facts.client_calls} calls of clients",
        "a service that has reached it accepts no connection and opens no file",
        f"ulimit -n {needed} in the shell that starts the run"
        if can_raise
        else f"raise the hard limit to {needed} (LimitNOFILE of systemd, ulimits of a container)",
    )


@dataclass(frozen=True, slots=True)
class NpuFacts:
    """An Ascend host, and what the run wants of it.

    Attributes:
        has_package: torch_npu is installed.
        demand: zero devices if no process of the run computes on an NPU.
    """

    host: AscendHost
    has_package: bool
    demand: AscendDemand


def check_npus(examined: Examined) -> Iterator[Finding]:
    """What a process on an NPU looks at when it starts, told before anything starts."""
    share = device_share(examined.config, examined.environment)
    replicas = examined.config.sluice.rollout.replicas
    wanted = share.trainer_ranks + replicas * share.devices_per_replica
    on_device = examined.config.sluice.weights.backend != "gloo"
    engine = examined.config.actor_rollout_ref.rollout.name
    demand = AscendDemand(wanted, on_device, share.devices_per_replica > 0 and engine == "vllm")
    return npu_findings(NpuFacts(ascend_host(examined.environment), has_torch_npu(), demand))


def npu_findings(facts: NpuFacts) -> Iterator[Finding]:
    """Those of `ascend_findings`; where nobody asks for an NPU, none of them ends a run."""
    is_wanted = facts.demand.num_devices > 0
    if not (is_wanted or facts.has_package or facts.host.num_devices):
        yield fine("no NPU is here, and none is asked for")
        return
    found = ascend_findings(facts.host, facts.demand)
    for one in found:
        if one.is_fatal and is_wanted:
            yield problem(one.what, "a process on an NPU refuses to start so", one.remedy)
        else:
            why = "a process on an NPU is slower so, or fails later"
            yield warning(one.what, why, one.remedy)
    if not found:
        yield fine(f"{facts.host.num_devices} NPU(s), torch_npu {facts.host.torch_npu_version}")


def check_gpu_count(examined: Examined) -> Iterator[Finding]:
    """One GPU is for one process."""
    return gpu_count_findings(
        gpu_share(examined.config, examined.environment),
        examined.config.sluice.rollout.replicas,
        collectives_on_device=examined.config.sluice.weights.backend != "gloo",
    )


def gpu_count_findings(
    share: DeviceShare, replicas: int, *, collectives_on_device: bool
) -> Iterator[Finding]:
    """Whether every process has one of its own."""
    wanted = share.trainer_ranks + replicas * share.devices_per_replica
    there = len(share.numbers)
    if wanted == 0:
        yield fine("no process of the run takes a GPU of its own")
    elif share.is_enough_for(replicas):
        yield fine(f"{there} GPU(s) are visible, the run takes {wanted}")
    else:
        report = problem if collectives_on_device else warning
        yield report(
            f"the run takes {wanted} GPUs ({share.trainer_ranks} trainer ranks, {replicas} "
            f"replicas of {share.devices_per_replica}), and {there} are visible",
            "processes would share GPUs, and NCCL takes one for one member of a group only"
            if collectives_on_device
            else "processes would share GPUs and their memory",
            "lower trainer.n_gpus_per_node or sluice.rollout.replicas, make more visible "
            f"({CUDA_VISIBLE_VARIABLE}), or set sluice.weights.backend=gloo",
        )
