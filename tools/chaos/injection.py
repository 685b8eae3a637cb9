"""Inject the schedule's faults into a run, and undo those that last."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.client.launcher import Launcher
from sluice.errors import SluiceError
from sluice.launch.servicer import launcher_of
from tools.chaos.cable import Cable
from tools.chaos.launched_run import FAR, LaunchedRun, Process
from tools.chaos.schedule import Fault, FaultKind

# The supervisor gives a process up that dies six times in a row, with no life of two minutes.
_MOST_RESTARTS, _LONG_LIFE_S = 4, 125.0
_START_FIELD = 19  # of what follows the command's name in /proc/PID/stat
_DELAYS_S = (0.05, 0.3)
_CORE = ("trainer", "reward")


@dataclass(frozen=True, slots=True)
class Injected:
    """The effect of a fault: when (monotonic), whom it hit, or why it could not be injected."""

    fault: Fault
    at_s: float
    target: str
    skipped: str = ""


class _Impossible(Exception):
    """The machine or the moment does not allow a fault."""


@dataclass(slots=True)
class Injector:
    """Injects faults into one run.

    Attributes:
        run: whose processes are hit.
        cable: to the far replica; or why there is none.
        done: all faults so far.
        stopped: service, from, to (monotonic) of each stop.
    """

    run: LaunchedRun
    cable: Cable | str
    done: list[Injected] = field(default_factory=list)
    stopped: list[tuple[str, float, float]] = field(default_factory=list)

    async def follow(self, schedule: Sequence[Fault]) -> None:
        """Inject all faults at their times; return when the last one is over."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in schedule:
                await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
                try:
                    target = await self._inject(fault, tasks)
                except (_Impossible, SluiceError, ProcessLookupError) as error:
                    why = str(error) or "the process had just ended"
                    self.done.append(Injected(fault, time.monotonic(), "", why))
                else:
                    self.done.append(Injected(fault, time.monotonic(), target))

    async def restore(self, replicas: int) -> None:
        """Bring back as many replicas as at the beginning."""
        await self._set_replicas(replicas)

    async def _inject(self, fault: Fault, tasks: asyncio.TaskGroup) -> str:
        processes = await self.run.processes()
        what, _, whom = fault.kind.partition("_")
        if what == "kill":
            return _kill_some(fault, whom, processes)
        if what == "stop":
            return self._stop(fault, _named(whom, processes), tasks)
        if fault.kind in (FaultKind.PARTITION, FaultKind.DELAY):
            return self._disturb(fault, tasks)
        return await self._change_fleet(fault, processes)

    async def _change_fleet(self, fault: Fault, processes: dict[str, Process]) -> str:
        if fault.kind is FaultKind.JOIN:
            return await self._set_replicas(len(_local(processes)) + 1)
        local = _local(processes)
        if len(local) < 2:
            raise _Impossible("one replica has to stay")
        if fault.kind is FaultKind.SCALE_DOWN:
            return await self._set_replicas(len(local) - 1)
        leaving = _chosen(fault, local)
        os.kill(leaving.pid, signal.SIGTERM)
        return leaving.name

    def _stop(self, fault: Fault, among: Sequence[Process], tasks: asyncio.TaskGroup) -> str:
        chosen = _chosen(fault, among)
        os.kill(chosen.pid, signal.SIGSTOP)
        tasks.create_task(self._resume(chosen, fault.seconds), name=f"{chosen.name} resumes")
        return chosen.name

    async def _resume(self, process: Process, seconds: float) -> None:
        from_s = time.monotonic()
        # A process that ends meanwhile must not be taken for another one with its id.
        handle = os.pidfd_open(process.pid)
        try:
            await asyncio.sleep(seconds)
        finally:
            try:
                signal.pidfd_send_signal(handle, signal.SIGCONT)
            except ProcessLookupError:
                pass
            finally:
                os.close(handle)
            self.stopped.append((process.name, from_s, time.monotonic()))

    def _disturb(self, fault: Fault, tasks: asyncio.TaskGroup) -> str:
        if isinstance(self.cable, str):
            raise _Impossible(self.cable)
        if self.cable.is_cut or self.cable.delay_s:
            raise _Impossible("the cable is disturbed already")
        if fault.kind is FaultKind.PARTITION:
            self.cable.is_cut = True
        else:
            low, high = _DELAYS_S
            self.cable.delay_s = low + (high - low) * fault.choice
        tasks.create_task(self._heal(self.cable, fault.seconds), name="the cable heals")
        return FAR

    async def _heal(self, cable: Cable, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            cable.is_cut, cable.delay_s = False, 0.0

    async def _set_replicas(self, count: int) -> str:
        found = launcher_of(self.run.run_dir)
        async with Launcher(found.address, found.credentials) as launcher:
            change = await launcher.set_replicas(count)
        return ", ".join((*change.started, *change.drained))


def _replicas(processes: dict[str, Process]) -> list[Process]:
    return [p for name, p in sorted(processes.items()) if name not in _CORE and not p.is_draining]


def _local(processes: dict[str, Process]) -> list[Process]:
    return [p for p in _replicas(processes) if p.name != FAR]


def _named(whom: str, processes: dict[str, Process]) -> list[Process]:
    """Return the service, or all replicas."""
    if whom == "replica":
        return _replicas(processes)
    return [processes[whom]] if whom in processes else []


def _mortal(processes: Sequence[Process]) -> list[Process]:
    """Return those that restart when they are killed: not too often, or after a long life."""
    return [
        process
        for process in processes
        if process.restarts < _MOST_RESTARTS or _age_s(process.pid) > _LONG_LIFE_S
    ]


def _age_s(pid: int) -> float:
    """Return seconds since a process started; 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    ticks = int(stat.rsplit(")", 1)[1].split()[_START_FIELD])
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return up_s - ticks / os.sysconf("SC_CLK_TCK")


def _chosen(fault: Fault, among: Sequence[Process]) -> Process:
    if not among:
        raise _Impossible("no such process runs, or one more death would end the run")
    return among[int(fault.choice * len(among))]


def _kill_some(fault: Fault, whom: str, processes: dict[str, Process]) -> str:
    if whom == "all":
        return _kill_all(processes)
    if whom == "scorer":
        return _kill_scorer(fault, processes)
    return _kill(_chosen(fault, _mortal(_named(whom, processes))))


def _kill(process: Process) -> str:
    os.kill(process.pid, signal.SIGKILL)
    return process.name


def _kill_all(processes: dict[str, Process]) -> str:
    core = [processes[name] for name in _CORE if name in processes]
    if len(_mortal(core)) < len(_CORE):
        raise _Impossible("one more death in a row would end the run")
    return ", ".join(_kill(process) for process in (*core, *_mortal(_replicas(processes))))


def _kill_scorer(fault: Fault, processes: dict[str, Process]) -> str:
    reward = processes.get("reward")
    scorers = [] if reward is None else _children(reward.pid, b"services.reward.grading.process")
    if not scorers:
        raise _Impossible("no scorer process runs")
    os.kill(scorers[int(fault.choice * len(scorers))], signal.SIGKILL)
    return "scorer"


def _children(parent: int, wanted: bytes) -> list[int]:
    """Return ids of a process's children whose command line holds `wanted`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(encoding="ascii", errors="replace")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat.rsplit(")", 1)[1].split()[1]) == parent and wanted in command:
            found.append(int(entry.name))
    return sorted(found)
