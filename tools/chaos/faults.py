"""The faults of a run: their schedule, their injection, and the end of those that last.

The schedule is a pure function of the seed. It deals kinds from a shuffled deck, so each occurs
about as often as the deck holds it. A random number decides which candidate of that moment is hit;
a fault that is impossible at its moment is skipped and reported.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from sluice.client.launcher import LaunchedProcess, Launcher
from sluice.concurrency.process import START_FIELD, stat_fields
from sluice.errors import SluiceError
from sluice.launch.servicer import launcher_of
from tools.chaos.cable import Cable
from tools.launched_run import LaunchedRun
from tools.phases import say

FAR = "rollout-far"
# Cards in the deck, and seconds that the fault lasts, from and to.
KINDS: dict[str, tuple[int, float, float]] = {
    "kill_replica": (2, 0.0, 0.0),
    "stop_replica": (2, 1.0, 15.0),
    "kill_reward": (1, 0.0, 0.0),
    "stop_reward": (1, 1.0, 8.0),
    "kill_trainer": (1, 0.0, 0.0),
    "stop_trainer": (1, 1.0, 8.0),
    "kill_all": (1, 0.0, 0.0),
    "kill_scorer": (1, 0.0, 0.0),
    "kill_environment": (2, 0.0, 0.0),
    "kill_front": (2, 0.0, 0.0),
    "leave": (1, 0.0, 0.0),
    "scale_down": (1, 0.0, 0.0),
    "join": (1, 0.0, 0.0),
    "partition": (2, 3.0, 10.0),
    "delay": (1, 4.0, 10.0),
}
PLAYED_BY = {"workers": "kill_environment", "leases": "kill_front"}
"""How a run may play episodes, and the kind that kills what plays them."""
REPLICAS = 2  # of the launcher at the beginning
# The supervisor gives a process up that dies six times in a row, with no life of two minutes.
_MAX_RESTARTS, _LONG_LIFE_S = 4, 125.0
_STATE_FIELD, _PARENT_FIELD = 0, 1
_ENDED = ("Z", "X")
_DEATH_S, _DEATH_POLL_S = 30.0, 0.01
_ANSWER_S = 60.0
_AFTER_SKIP_S = 1.0
_DELAYS_S = (0.05, 0.3)
_CORE = ("trainer", "reward")
# Modules of processes that the reward service starts.
_CHILDREN = {
    "scorer": b"services.reward.grading.scorer_main",
    "environment": b"services.reward.episodes.worker_main",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when, seconds from the first possible moment.
        kind: a key of `KINDS`.
        choice: in [0, 1): which of the candidates is hit.
        seconds: how long it lasts; 0: it does not last.
    """

    at_s: float
    kind: str
    choice: float
    seconds: float


def make_schedule(
    seed: int, seconds: float, interval_s: float, kinds: Sequence[str]
) -> tuple[Fault, ...]:
    """Return faults of `kinds` in order of time; the last one has ended before `seconds`.

    Gaps are 0.5 to 1.5 times `interval_s` long.
    """
    rng, deck, faults = random.Random(seed), list[str](), list[Fault]()
    at_s = rng.uniform(0.0, interval_s)
    while at_s < seconds:
        if not deck:
            deck = [kind for kind in kinds for _ in range(KINDS[kind][0])]
            rng.shuffle(deck)
        kind = deck.pop()
        _, shortest_s, longest_s = KINDS[kind]
        lasts_s = min(rng.uniform(shortest_s, longest_s), seconds - at_s)
        faults.append(Fault(round(at_s, 2), kind, rng.random(), round(lasts_s, 2)))
        at_s += interval_s * rng.uniform(0.5, 1.5)
    return tuple(faults)


def single_faults(seed: int, kinds: Sequence[str]) -> Iterator[Fault]:
    """Yield faults of `kinds` without end, of mean length; each round is shuffled."""
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            _, shortest_s, longest_s = KINDS[kind]
            yield Fault(0.0, kind, rng.random(), (shortest_s + longest_s) / 2)


@dataclass(frozen=True, slots=True)
class Injected:
    """When a fault was injected (monotonic) and into what, or why it could not be."""

    fault: Fault
    at_s: float
    target: str
    skipped: str = ""

    @property
    def over_s(self) -> float:
        """Return when it was over."""
        return self.at_s + self.fault.seconds


class _Impossible(Exception):
    """The machine or the moment does not allow a fault."""


@dataclass(slots=True)
class Injector:
    """Injects faults into one run.

    Attributes:
        run: whose processes are hit.
        cable: to the far replica; or why there is none.
        far: the process of the far replica, while it runs.
        front: the process of `sluice agents run`, while it runs.
        done: all faults so far.
        stopped: service, from, to (monotonic) of each stop.
    """

    run: LaunchedRun
    cable: Cable | str
    far: LaunchedProcess | None = None
    front: LaunchedProcess | None = None
    done: list[Injected] = field(default_factory=list)
    stopped: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def ledgers(self) -> Path:
        """Return the folder of ledgers of reward services that were killed (`read_leases`)."""
        return self.run.run_dir.parent / "ledgers"

    async def follow(self, schedule: Sequence[Fault]) -> None:
        """Inject all faults at their times; return when the last one is over."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in schedule:
                await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
                await self._try(fault, tasks)

    async def follow_singly(
        self,
        faults: Iterable[Fault],
        recover: Callable[[Injected], Awaitable[None]],
        *,
        until_s: float,
    ) -> None:
        """Until then (monotonic), inject each fault and await its recovery before the next one."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                now_s = time.monotonic()
                if now_s >= until_s:
                    return
                injected = await self._try(replace(fault, at_s=now_s - began_s), tasks)
                if injected.skipped:
                    await asyncio.sleep(_AFTER_SKIP_S)
                else:
                    await asyncio.sleep(fault.seconds)
                    await recover(injected)

    async def _try(self, fault: Fault, tasks: asyncio.TaskGroup) -> Injected:
        try:
            target, why = await self._inject(fault, tasks), ""
        except (_Impossible, SluiceError, ProcessLookupError) as error:
            target, why = "", str(error) or "the process had just ended"
        found = Injected(fault, time.monotonic(), target, why)
        self.done.append(found)
        say(f"{fault.at_s:7.1f} s  {fault.kind}: {f'not possible: {why}' if why else target}")
        return found

    async def set_replicas(self, count: int) -> str:
        """Scale as `sluice scale` does; return the names of replicas that start or leave."""
        if not 1 <= count <= REPLICAS + 1:
            raise _Impossible(f"the launcher keeps 1 to {REPLICAS + 1} replicas")
        found = launcher_of(self.run.run_dir)
        async with Launcher(found.address, found.credentials) as launcher:
            change = await launcher.set_replicas(count)
        return ", ".join((*change.started, *change.drained))

    async def _inject(self, fault: Fault, tasks: asyncio.TaskGroup) -> str:
        processes = await self._processes()
        local = [
            one
            for name, one in sorted(processes.items())
            if name not in _CORE and not one.is_draining
        ]
        replicas = [*local, *([self.far] if self.far else ())]
        action, _, whom = fault.kind.partition("_")
        among = replicas if whom == "replica" else [processes[whom]] if whom in processes else []
        match action:
            case "kill" if whom == "all":
                killed = _kill_all([processes[n] for n in _CORE if n in processes], replicas)
                await self._keep_ledger(processes["reward"])
                return killed
            case "kill" if whom in _CHILDREN:
                return _kill(_chosen(fault, _children(processes.get("reward"), whom)))
            case "kill" if whom == "front":
                return _kill(_chosen(fault, [self.front] if self.front else []))
            case "kill":
                chosen = _chosen(fault, [one for one in among if _is_mortal(one)])
                _kill(chosen)
                if whom == "reward":
                    await self._keep_ledger(chosen)
                return chosen.name
            case "stop":
                return self._stop(_chosen(fault, among), fault.seconds, tasks)
            case "partition" | "delay":
                return self._disturb(fault, tasks)
            case "leave":
                if len(local) < 2:
                    raise _Impossible("one replica has to stay")
                leaving = _chosen(fault, local)
                os.kill(leaving.pid, signal.SIGTERM)
                return leaving.name
            case _:
                return await self.set_replicas(len(local) + (1 if action == "join" else -1))

    async def _processes(self) -> dict[str, LaunchedProcess]:
        """Return those of the run; a launcher on a busy machine may answer late."""
        until_s = time.monotonic() + _ANSWER_S
        while True:
            found = await self.run.processes()
            if found or time.monotonic() > until_s:
                return found
            await asyncio.sleep(_DEATH_POLL_S)

    async def _keep_ledger(self, reward: LaunchedProcess) -> None:
        """Copy the ledger of a reward service that was killed, before the next one can change it:
        it alone has the batch at the trainer, which gets no dump."""
        killed_s = time.time()
        while (fields := stat_fields(reward.pid)) and fields[_STATE_FIELD] not in _ENDED:
            if time.time() > killed_s + _DEATH_S:
                return
            await asyncio.sleep(_DEATH_POLL_S)
        kept = self.ledgers / f"{killed_s:.3f}"
        kept.mkdir(parents=True)
        for file in (self.run.run_dir / "reward").glob("ledger.sqlite*"):
            shutil.copyfile(file, kept / file.name)

    def _stop(self, chosen: LaunchedProcess, seconds: float, tasks: asyncio.TaskGroup) -> str:
        os.kill(chosen.pid, signal.SIGSTOP)
        tasks.create_task(self._resume(chosen, seconds), name=f"{chosen.name} resumes")
        return chosen.name

    async def _resume(self, process: LaunchedProcess, seconds: float) -> None:
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
        if fault.kind == "partition":
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


def _is_mortal(process: LaunchedProcess) -> bool:
    """Return whether it restarts when it is killed: not too often, or after a long life."""
    if process.restarts < _MAX_RESTARTS:
        return True
    fields = stat_fields(process.pid)
    started_s = int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK") if fields else math.inf
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s > _LONG_LIFE_S


def _chosen(fault: Fault, among: Sequence[LaunchedProcess]) -> LaunchedProcess:
    if not among:
        raise _Impossible("no such process runs, or one more death would end the run")
    return among[int(fault.choice * len(among))]


def _kill(process: LaunchedProcess) -> str:
    os.kill(process.pid, signal.SIGKILL)
    return process.name


def _kill_all(core: Sequence[LaunchedProcess], replicas: Sequence[LaunchedProcess]) -> str:
    if sum(map(_is_mortal, core)) < len(_CORE):
        raise _Impossible("one more death in a row would end the run")
    return ", ".join(map(_kill, (*core, *filter(_is_mortal, replicas))))


def _children(reward: LaunchedProcess | None, kind: str) -> list[LaunchedProcess]:
    """Return the processes of a kind that the reward service has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            is_one = _CHILDREN[kind] in (entry / "cmdline").read_bytes()
            parent = stat_fields(int(entry.name))[_PARENT_FIELD:][:1]
            if reward and is_one and parent == [str(reward.pid)]:
                found.append(LaunchedProcess(kind, int(entry.name), 0, is_draining=False))
    return sorted(found, key=lambda one: one.pid)
