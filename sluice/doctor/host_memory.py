"""The host's free memory against what the processes of a run put there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.config.memory.layout_reading import own_training_layout, rollout_layout
from sluice.config.memory.model_shape import ModelShape
from sluice.config.memory.rollout_memory import rollout_memory
from sluice.config.memory.training_memory import training_memory
from sluice.device.ascend_host import wants_npu
from sluice.device.cuda_host import wants_gpu
from sluice.doctor.byte_sizes import GIB, gib
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning

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
class Part:
    """What some processes take, bytes: bare and with their weights; with all that they may hold."""

    name: str
    at_least: float
    at_most: float


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """`available`: bytes, ``None`` if it is not known; `needed`: by what takes it."""

    available: int | None
    needed: tuple[Part, ...]


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


def needed(examined: Examined, shape: ModelShape) -> tuple[Part, ...]:
    """Of this host's trainer ranks, replicas and scorers."""
    config = examined.config
    ranks, replicas = config.trainer.n_gpus_per_node, config.sluice.rollout.replicas
    rank, replica = _rank(examined, shape), _replica(examined, shape)
    snapshots = COPIES * shape.total_parameters * own_training_layout(config).master_bytes
    return (
        Part(
            f"{ranks} trainer rank(s)",
            ranks * rank.at_least,
            ranks * rank.at_most + snapshots,
        ),
        Part(f"{replicas} replica(s)", replicas * replica.at_least, replicas * replica.at_most),
        Part("reward service", BARE_BYTES, BARE_BYTES),
    )


def _rank(examined: Examined, shape: ModelShape) -> Part:
    if _is_on_device(examined.config.trainer.device, examined):
        return Part("", BARE_ON_DEVICE_BYTES, BARE_ON_DEVICE_BYTES)
    held = training_memory(shape, own_training_layout(examined.config))
    state = held.parameters + held.gradients + held.optimizer
    return Part("", BARE_BYTES + state, BARE_BYTES + held.update)


def _replica(examined: Examined, shape: ModelShape) -> Part:
    layout = rollout_layout(examined.config, examined.settings)
    staged = COPIES * shape.total_parameters * layout.weight_bytes
    if _is_on_device(examined.config.sluice.rollout.device, examined):
        return Part("", BARE_ON_DEVICE_BYTES, BARE_ON_DEVICE_BYTES + staged)
    held = rollout_memory(shape, layout, None)
    cache = held.activations + held.kv_of_all_sequences
    return Part("", BARE_BYTES + held.weights, BARE_BYTES + held.weights + staged + cache)


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
