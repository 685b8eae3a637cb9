"""A started process, and what is left of one that was not started after all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.launch.cluster.nodes import ServiceHost
from sluice.launch.processes.child import LocalChild, start_child
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED
from sluice.launch.service_spec import ServiceSpec
from tests.support.scripted_children import (
    SLEEP,
    WAIT_S,
    Supervised,
    end_self,
    open_gate,
    spec,
)


def pipes() -> set[tuple[str, str]]:
    """Ends of pipes that this process has open, by descriptor and pipe."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith("pipe:"):
            found.add((name, target))
    return found


async def until_no_more_than(before: set[tuple[str, str]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while pipes() - before:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
async def test_a_start_that_is_given_up_at_any_step_leaves_no_pipe_open(steps: int) -> None:
    before = pipes()
    spec = ServiceSpec("rollout-0", (sys.executable, "-c", "import time; time.sleep(600)"))
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(start_child(spec))
        for _ in range(steps):
            await asyncio.sleep(0)
        assert not starting.done()
        starting.cancel()
    assert starting.cancelled()
    await until_no_more_than(before)


async def test_a_program_that_is_not_there_leaves_no_pipe_open() -> None:
    before = pipes()
    with pytest.raises(ConfigError, match="/no/such/program cannot be started"):
        await start_child(ServiceSpec("reward", ("/no/such/program",)))
    await until_no_more_than(before)


@pytest.fixture
def held_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> list[LocalChild]:
    """Processes that no signal ends, as one that waits for a dead disk."""
    held: list[LocalChild] = []

    def of_no_effect(child: LocalChild) -> None:
        if not child.has_ended:
            held.append(child)

    monkeypatch.setattr("sluice.launch.processes.child.KILLED_S", 0.1)
    monkeypatch.setattr("sluice.launch.processes.crew.KILLED_S", 0.1)
    monkeypatch.setattr(LocalChild, "terminate", of_no_effect)
    monkeypatch.setattr(LocalChild, "kill", of_no_effect)
    return held


async def really_kill(child: LocalChild) -> None:
    """Ends it, and waits until the loop knows, which would warn of a running process otherwise."""
    os.killpg(child.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        assert await child.wait() == -signal.SIGKILL


SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


async def test_a_process_that_the_kernel_holds_is_left_behind_and_named(
    held_by_the_kernel: list[LocalChild], caplog: pytest.LogCaptureFixture
) -> None:
    child = await start_child(ServiceSpec("rollout-0", SLEEPER))
    async with asyncio.timeout(WAIT_S):
        await child.end(0.0)
    assert not child.has_ended
    assert f"process {child.pid} has not ended 0.1 s after SIGKILL" in caplog.text
    assert held_by_the_kernel == [child, child]
    await really_kill(child)


async def test_a_host_starts_nothing_beside_a_process_that_does_not_end(
    held_by_the_kernel: list[LocalChild],
) -> None:
    host = ServiceHost("127.0.0.1")
    first, _ = await host.start("rollout-0", list(SLEEPER), {})
    assert await host.start("rollout-0", list(SLEEPER), {}) == (
        0,
        f"process {first}, started before, does not end after SIGKILL",
    )
    assert {child.pid for child in held_by_the_kernel} == {first}
    os.killpg(first, signal.SIGKILL)
    assert await host.ended(first) == -signal.SIGKILL


async def test_a_run_ends_though_the_kernel_holds_one_of_its_processes(
    held_by_the_kernel: list[LocalChild], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Supervised(tmp_path, spec("rollout-0", SLEEP), grace_s=0.1)
    end = await run.run(when_ready=end_self(signal.SIGINT))
    assert end.exit_code == EXIT_INTERRUPTED
    assert "rollout-0 did not end within 0.1 s and was killed" in caplog.text
    (held,) = set(held_by_the_kernel)
    assert f"process {held.pid} has not ended 0.1 s after SIGKILL" in caplog.text
    await really_kill(held)


async def test_nothing_is_started_again_beside_a_process_that_the_kernel_holds(
    held_by_the_kernel: list[LocalChild], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.launch.processes.crew._COMPANIONS_S", 0.1)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    held = spec("trainer-0", SLEEP, crew="trainer", max_restarts=3)
    fails = f"open({str(gate)!r}).read(); raise SystemExit(1)"
    other = spec("trainer-1", fails, crew="trainer", max_restarts=3)
    run = Supervised(tmp_path / "logs", held, other, grace_s=0.1)
    async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until(lambda: "ready" in run.said("trainer-0"))
        await open_gate(gate)
    end = ending.result()
    (left,) = set(held_by_the_kernel)
    await really_kill(left)
    assert end.failures == (
        "trainer-0: not ended by SIGKILL; nothing is started beside what it holds",
    )
    assert run.said("trainer-0") == ["ready"]
