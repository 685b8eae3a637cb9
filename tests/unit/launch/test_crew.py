"""Processes that start and end together, crash loops, and processes that come and go."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.concurrency.watchdog import EXIT_STALLED
from sluice.config.loading.loader import load_config
from sluice.errors import NotFoundError, NotReadyError
from sluice.launch.processes import crew as crew_module
from sluice.launch.processes import supervisor as supervisor_module
from sluice.launch.processes.child import Child, ThisMachine
from sluice.launch.processes.crew import CrewEnd, ProcessExit
from sluice.launch.processes.supervisor import Supervisor
from sluice.launch.service_spec import (
    RESTARTS_AFTER_ERRORS_TOO,
    ServiceSpec,
    local_services,
    with_ports,
)
from sluice.service_contract import RESTARTS_VARIABLE
from tests.support.scripted_children import (
    POLITE,
    SLEEP,
    STUBBORN,
    WAIT_S,
    Supervised,
    end_self,
    polite,
    spec,
    until_gone,
)

SERVICES = ("reward", "trainer", "trainer-1", "rollout-0")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(crew_module, "_COMPANIONS_S", 0.3)


def rank(number: int, script: str, **policy: Any) -> ServiceSpec:
    given: dict[str, Any] = {
        "max_restarts": 1,
        "retries_errors": False,
        "is_needed": True,
        **policy,
    }
    return spec(f"trainer-{number}", script, crew="trainer", **given)


def once(mark: Path, first: str, then: str) -> str:
    """Does `first` at its first start and `then` at later ones."""
    return f"""
import os, pathlib, signal, sys, time
mark = pathlib.Path({str(mark)!r})
print("ready", os.environ[{RESTARTS_VARIABLE!r}])
if not mark.exists():
    mark.write_text("")
    {first}
else:
    {then}
"""


KILL_SELF = "os.kill(os.getpid(), signal.SIGKILL)"


def until_exists(path: Path, *, exists: bool = True) -> str:
    """Waits for a file, or for its end."""
    return f"[time.sleep(.01) for _ in iter(lambda: os.path.exists({str(path)!r}), {exists})]"


@pytest.mark.parametrize("other", [POLITE.format(code=0), STUBBORN])
async def test_when_one_of_a_crew_is_killed_all_end_and_start_together(
    tmp_path: Path, other: str
) -> None:
    # Not before the other one has begun.
    dies = f"{until_exists(tmp_path / 'other')}; {KILL_SELF}"
    follower = rank(1, once(tmp_path / "mark", dies, "sys.exit(0)"))
    leader = rank(0, once(tmp_path / "other", other.replace("\n", "\n    "), "sys.exit(0)"))
    run = Supervised(tmp_path, replace(leader, ends_run=True), follower, grace_s=3.0)
    end = await run.run()
    assert (end.exit_code, end.failures) == (0, ())
    assert [line for line in run.said("trainer-0") if line.startswith("ready ")] == [
        "ready 0",
        "ready 1",
    ]
    assert run.said("trainer-1") == ["ready 0", "ready 1"]
    await until_gone(*run.pids)


async def test_a_rank_that_fails_because_another_was_killed_is_not_taken_for_the_cause(
    tmp_path: Path,
) -> None:
    begun, process = tmp_path / "other", tmp_path / "process"
    leaves = f"os.symlink(f'/proc/{{os.getpid()}}', {str(process)!r})"
    dies = f"{until_exists(begun)}; {leaves}; {KILL_SELF}"
    killed = once(tmp_path / "mark", dies, "sys.exit(0)")
    # It has ended, and its end has been noticed.
    notices = f"{until_exists(process)}; {until_exists(process, exists=False)}"
    fails = once(begun, f"{notices}; sys.exit('rank 1 is gone')", "sys.exit(0)")
    leader = rank(0, fails, ends_run=True)
    end = await Supervised(tmp_path, leader, rank(1, killed)).run()
    assert (end.exit_code, end.failures) == (0, ())


def test_the_cause_is_the_end_in_order_then_a_signal_then_the_first_error() -> None:
    leads, follows = ServiceSpec("trainer", (), ends_run=True), ServiceSpec("trainer-1", ())

    def cause(*exits: tuple[ServiceSpec, int, bool]) -> int:
        return CrewEnd(tuple(ProcessExit(*each) for each in exits)).cause.code

    assert cause((follows, 1, False), (leads, -9, False)) == -9
    assert cause((leads, 1, False), (follows, 2, False)) == 1
    assert cause((leads, 1, False), (follows, -9, True)) == 1
    assert cause((leads, 1, False), (follows, EXIT_STALLED, False)) == EXIT_STALLED
    assert cause((leads, 0, False), (follows, -9, False)) == 0
    assert cause((follows, 0, False), (leads, 3, False)) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
async def test_a_log_that_cannot_be_written_ends_no_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trainer.log").symlink_to("/dev/full")
    says = "print('ready'); print('step 1'); sys.exit(0)"
    trainer = spec("trainer", f"import sys; {says}", ends_run=True)
    run = Supervised(tmp_path, trainer, polite("reward"))
    end = await run.run()
    assert (end.exit_code, end.failures) == (0, ())
    assert run.said("trainer") == ["ready", "step 1"]
    assert caplog.text.count("No space left on device") == 1


async def test_a_process_that_its_watchdog_ended_is_started_again(tmp_path: Path) -> None:
    hangs = once(tmp_path / "mark", f"sys.exit({EXIT_STALLED})", "sys.exit(0)")
    trainer = spec("trainer", hangs, max_restarts=1, retries_errors=False, ends_run=True)
    end = await Supervised(tmp_path, trainer).run()
    assert (end.exit_code, end.failures) == (0, ())


async def test_a_needed_process_that_somebody_asked_to_end_is_not_started_again(
    tmp_path: Path,
) -> None:
    trainer = spec("trainer", SLEEP, max_restarts=5, ends_run=True, is_needed=True)
    run = Supervised(tmp_path, trainer)

    def ask() -> None:
        pid = run.supervisor.pid_of("trainer")
        assert pid is not None
        os.kill(pid, signal.SIGTERM)

    end = await run.run(when_ready=ask)
    assert (end.exit_code, end.failures) == (1, ("trainer ended with SIGTERM:\n  ready",))


@pytest.mark.parametrize("name", SERVICES)
async def test_a_crash_loop_of_any_service_ends_the_run_with_its_last_lines(
    tmp_path: Path, name: str
) -> None:
    config = with_ports(load_config(None, ["trainer.n_gpus_per_node=2"]))
    crash = "import os; print('no space left', flush=True); os.kill(os.getpid(), 9)"

    def scripted(real: ServiceSpec) -> ServiceSpec:
        code = crash if real.name == name else POLITE.format(code=0)
        return replace(real, command=(sys.executable, "-c", code))

    specs = [scripted(real) for real in local_services(config, tmp_path / "run.yaml")]
    run = Supervised(tmp_path, *specs)
    end = await run.run()
    assert end.exit_code == 1
    assert end.failures[0].startswith(f"{name} ended with SIGKILL after 5 restarts:\n")
    assert end.failures[0].endswith("\n  no space left")
    assert run.said(name) == ["no space left"] * 6
    await until_gone(*run.pids)


async def test_processes_are_added_and_dismissed_while_the_run_continues(tmp_path: Path) -> None:
    run = Supervised(tmp_path, polite("reward"))
    with pytest.raises(NotReadyError):
        run.supervisor.add(polite("rollout-1"))
    async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until_ready()
        run.supervisor.add(polite("rollout-1"))
        await run.until(lambda: run.said("rollout-1") == ["ready"])
        run.supervisor.dismiss("rollout-1")
        assert run.supervisor.services()[-1].is_draining
        while len(run.supervisor.services()) > 1:
            await asyncio.sleep(0.01)
        assert run.said("rollout-1") == ["ready", "bye"]
        with pytest.raises(NotFoundError, match="rollout-1"):
            run.supervisor.dismiss("rollout-1")
        end_self(signal.SIGINT)()
    assert (ending.result().exit_code, ending.result().failures) == (130, ())


async def test_a_process_that_does_not_leave_is_killed_and_the_run_continues(
    tmp_path: Path,
) -> None:
    dismissed: list[str] = []
    run = Supervised(
        tmp_path,
        polite("reward"),
        spec("rollout-0", STUBBORN),
        grace_s=0.3,
        on_dismissed=dismissed.append,
    )
    async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until_ready()
        run.supervisor.dismiss("rollout-0")
        while len(run.supervisor.services()) > 1:
            await asyncio.sleep(0.01)
        assert dismissed == ["rollout-0"]
        end_self(signal.SIGINT)()
    assert (ending.result().exit_code, ending.result().failures) == (130, ())
    assert dismissed == ["rollout-0"]  # the others end with the run


async def test_a_process_that_waits_for_its_restart_can_be_dismissed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 600.0)
    run = Supervised(tmp_path, polite("reward"), spec("rollout-0", "exit(3)", max_restarts=9))
    async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until(lambda: bool(run.said("reward")))
        while not any(state.restarts for state in run.supervisor.services()):
            await asyncio.sleep(0.01)
        run.supervisor.dismiss("rollout-0")
        while len(run.supervisor.services()) > 1:
            await asyncio.sleep(0.01)
        end_self(signal.SIGINT)()
    assert (ending.result().exit_code, ending.result().failures) == (130, ())


async def test_a_wait_for_capacity_is_no_life_after_which_restarts_count_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(ThisMachine):
        """A host on which a start waits, or finds no place, for longer than a stable life."""

        waits = 0

        async def start(self, spec: ServiceSpec) -> Child:
            self.waits += 1
            if self.waits % 2:
                raise OSError(errno.EAGAIN, "no place")
            return await super().start(spec)

    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.0)
    host = Full()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * host.waits)
    monkeypatch.setattr(crew_module, "time", clock)
    monkeypatch.setattr(supervisor_module, "time", clock)
    restarts = replace(RESTARTS_AFTER_ERRORS_TOO, stable_s=900)
    fails = ServiceSpec("rollout-0", ("/bin/false",), restarts=restarts)
    supervisor = Supervisor((fails,), tmp_path, lambda *_: None, WAIT_S, host)
    async with asyncio.timeout(WAIT_S):
        end = await supervisor.run()
    assert end.failures[0].startswith("rollout-0 ended with code 1 after 5 restarts:")
