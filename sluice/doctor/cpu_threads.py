"""CPUs against the threads that compute on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.device.ascend_host import wants_npu
from sluice.device.cuda_host import wants_gpu
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, warning

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
