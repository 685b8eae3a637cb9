"""Services that start as forks of a process with their imports: the same as started ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from sluice.concurrency.waits import deadline
from sluice.config.loading.loader import load_config
from sluice.launch.plan import this_machine
from sluice.launch.processes import forking
from sluice.launch.processes.child import Child
from sluice.launch.processes.forking import ForkingMachine
from sluice.launch.service_spec import ServiceSpec
from tests.support.scripted_children import WAIT_S, is_alive, until_gone
from tests.support.source_tree import ROOT

HEAVY = """
from pathlib import Path
with Path(__file__).with_name("imports").open("a") as file:
    file.write("x")
"""
SERVICE = """
import heavy, os, sys, time
from sluice.concurrency.process import end_with_supervisor
end_with_supervisor()
what = sys.argv[1]
print(what, os.environ.get("OWN"), os.getpid() == os.getpgid(0), sys.stdin.read() == "")
if what == "sleep":
    time.sleep(600)
if what == "code":
    sys.exit(7)
if what == "text":
    sys.exit("gave up")
if what == "outlive":
    import ctypes
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # a large process takes some time to die
    print("deaf")
    while os.getppid() == parent:
        time.sleep(0.01)
    print("outlived")
    time.sleep(600)
if what == "interrupt":
    os.kill(os.getpid(), 2)
    time.sleep(600)
if what == "draw":
    import numpy
    print(numpy.random.random())
if what == "collects":
    import gc
    print(gc.isenabled(), gc.get_freeze_count() > 0)
if what == "error":
    raise ValueError("broken")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "forked").mkdir()
    (tmp_path / "forked" / "__init__.py").touch()
    (tmp_path / "forked" / "__main__.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    return tmp_path


@pytest.fixture
async def machine(folder: Path) -> AsyncIterator[ForkingMachine]:
    machine = ForkingMachine(("forked",), ("heavy", "not_there"), 1)
    yield machine
    machine.release("a")
    machine.release("b")


def forked(what: str, name: str = "a", threads: str = "1") -> ServiceSpec:
    environment = {"OMP_NUM_THREADS": threads, "OWN": f"of {name}"}
    return ServiceSpec(name, (sys.executable, "-m", "forked", what), environment)


async def outcome(child: Child) -> tuple[int, list[str]]:
    async with asyncio.timeout(WAIT_S):
        lines = [line async for line in child.lines()]
        code = await child.wait()
        await child.end(WAIT_S)
    return code, lines


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.parametrize(
    ("what", "code", "last"),
    [
        ("return", 0, "return of a True True"),
        ("code", 7, "code of a True True"),
        ("text", 1, "gave up"),
        ("error", 1, "ValueError: broken"),
    ],
)
async def test_a_fork_has_the_arguments_variables_output_and_exit_code_of_a_started_process(
    machine: ForkingMachine, what: str, code: int, last: str
) -> None:
    found, lines = await outcome(await machine.start(forked(what)))
    assert (found, lines[0], lines[-1]) == (code, f"{what} of a True True", last)


async def test_what_takes_long_to_import_is_imported_once(
    machine: ForkingMachine, folder: Path
) -> None:
    for name in ("a", "b", "a"):
        assert (await outcome(await machine.start(forked("return", name))))[0] == 0
    assert (folder / "imports").read_text() == "x"


async def test_signals_reach_a_fork_and_its_code_names_them(machine: ForkingMachine) -> None:
    asked, killed = await machine.start(forked("sleep")), await machine.start(forked("sleep", "b"))
    assert parent_of(asked.pid) == parent_of(killed.pid) != os.getpid()
    shown = Path(f"/proc/{killed.pid}/cmdline").read_bytes().rstrip(b"\0")
    assert tuple(os.fsdecode(shown).split("\0")) == (sys.executable, "-m", "forked", "sleep")
    asked.terminate()
    killed.kill()
    assert (await outcome(asked))[0] == -signal.SIGTERM
    assert (await outcome(killed))[0] == -signal.SIGKILL


async def test_forks_of_a_template_that_dies_count_as_killed_and_the_next_has_another_one(
    machine: ForkingMachine,
) -> None:
    first = await machine.start(forked("sleep"))
    template = parent_of(first.pid)
    os.kill(template, signal.SIGKILL)
    assert (await outcome(first))[0] == -signal.SIGKILL
    await until_gone(first.pid)
    second = await machine.start(forked("sleep"))
    assert parent_of(second.pid) not in (template, os.getpid())
    second.kill()
    assert (await outcome(second))[0] == -signal.SIGKILL


async def test_a_fork_ends_for_its_supervisor_when_it_ends_not_when_its_template_does(
    folder: Path,
) -> None:
    machine = ForkingMachine(("forked",), (), 1)
    child = await machine.start(forked("outlive"))
    lines = child.lines()
    assert await anext(lines) == "outlive of a True True"
    assert await anext(lines) == "deaf"
    template = parent_of(child.pid)
    os.kill(template, signal.SIGKILL)
    await until_gone(template)
    assert await anext(lines) == "outlived"
    assert not child.has_ended
    assert is_alive(child.pid)
    child.terminate()
    code, _ = await outcome(child)
    assert code == -signal.SIGKILL
    assert not is_alive(child.pid)
    machine.release("a")


async def test_a_template_that_does_not_answer_is_awaited_once_and_its_forks_live(
    machine: ForkingMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = await machine.start(forked("sleep", "b"))
    template = parent_of(living.pid)
    os.kill(template, signal.SIGSTOP)
    waits: list[float] = []

    def noted(seconds: float, **where: str) -> AbstractAsyncContextManager[None]:
        waits.append(seconds)
        return deadline(0.0, **where)

    monkeypatch.setattr(forking, "deadline", noted)
    for _ in range(2):
        child = await machine.start(forked("return"))
        assert (await outcome(child))[0] == 0
    assert len(waits) == 1
    assert is_alive(living.pid)
    os.kill(template, signal.SIGCONT)
    living.kill()
    assert (await outcome(living))[0] == -signal.SIGKILL
    # It has answered, so it is asked again.
    monkeypatch.setattr(forking, "deadline", deadline)
    last = await machine.start(forked("sleep"))
    assert parent_of(last.pid) == template
    last.kill()
    await outcome(last)


async def test_other_programs_and_other_numbers_of_threads_start_as_usual(
    machine: ForkingMachine,
) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    for spec in (forked("sleep", threads="2"), ServiceSpec("b", command)):
        child = await machine.start(spec)
        assert parent_of(child.pid) == os.getpid()
        child.kill()
        await outcome(child)


async def test_the_template_ends_with_the_last_service(machine: ForkingMachine) -> None:
    child = await machine.start(forked("sleep"))
    template = parent_of(child.pid)
    child.kill()
    await outcome(child)
    assert is_alive(template)
    machine.release("a")
    await until_gone(template)


async def test_a_start_that_is_given_up_leaves_no_fork(machine: ForkingMachine) -> None:
    other = await machine.start(forked("sleep", "b"))
    template = parent_of(other.pid)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(machine.start(forked("sleep")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
    assert starting.cancelled()
    other.kill()
    await outcome(other)
    # Its answers come in order, so this one comes after the one that nobody awaits.
    assert (await outcome(await machine.start(forked("return"))))[0] == 0
    children = Path(f"/proc/{template}/task/{template}/children")
    async with asyncio.timeout(WAIT_S):
        while children.read_text().strip():
            await asyncio.sleep(0.01)


FAILING = """
import os
real = os.{call}
def failing(*arguments):
    os.{call} = real
    raise BlockingIOError(11, "none is free")
os.{call} = failing
"""


@pytest.mark.parametrize("call", ["pipe", "fork", "pidfd_open"])
async def test_a_start_that_the_kernel_refuses_a_template_goes_without_it_and_the_next_is_forked(
    folder: Path, call: str
) -> None:
    (folder / "failing.py").write_text(FAILING.format(call=call))
    machine = ForkingMachine(("forked",), ("failing",), 1)
    parents = []
    for name in ("a", "b"):
        child = await machine.start(forked("sleep", name))
        parents.append(parent_of(child.pid))
        child.kill()
        await outcome(child)
    machine.release("a")
    machine.release("b")
    assert parents[0] == os.getpid() != parents[1]


ODD = """
import os
os.getppid = lambda: 1  # as after the template's death
"""


async def test_a_fork_whose_template_has_just_died_ends(folder: Path) -> None:
    (folder / "odd.py").write_text(ODD)
    machine = ForkingMachine(("forked",), ("odd",), 1)
    code, lines = await outcome(await machine.start(forked("sleep")))
    machine.release("a")
    assert (code, lines) == (1, ["the supervisor is gone"])


async def test_a_program_that_was_imported_runs_without_a_warning(folder: Path) -> None:
    machine = ForkingMachine(("forked",), ("forked.__main__",), 1)
    code, lines = await outcome(await machine.start(forked("return")))
    machine.release("a")
    assert (code, lines) == (0, ["return of a True True"])


async def test_an_interrupt_that_a_program_does_not_handle_ends_it_as_a_signal(
    machine: ForkingMachine,
) -> None:
    code, lines = await outcome(await machine.start(forked("interrupt")))
    assert (code, lines[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


async def test_a_fork_collects_garbage_though_the_imports_are_no_part_of_it(folder: Path) -> None:
    machine = ForkingMachine(("forked",), ("heavy",), 1)
    code, lines = await outcome(await machine.start(forked("collects")))
    machine.release("a")
    assert (code, lines[1:]) == (0, ["True True"])


async def test_forks_draw_different_numbers(folder: Path) -> None:
    machine = ForkingMachine(("forked",), ("numpy.random",), 1)
    outcomes = [await outcome(await machine.start(forked("draw"))) for _ in range(2)]
    machine.release("a")
    assert outcomes[0][0] == outcomes[1][0] == 0
    assert outcomes[0][1] != outcomes[1][1]


SUPERVISOR = """
import asyncio, sys
from sluice.launch.processes.forking import ForkingMachine
from sluice.launch.service_spec import ServiceSpec
async def main():
    command = (sys.executable, "-m", "forked", "sleep")
    spec = ServiceSpec("a", command, {"OMP_NUM_THREADS": "1"})
    child = await ForkingMachine(("forked",), (), 1).start(spec)
    async for _ in child.lines():
        print(child.pid, flush=True)
asyncio.run(main())
"""


async def test_forks_die_with_a_supervisor_that_is_killed(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        pid = int(output.readline())
        template = parent_of(pid)
        process.kill()
        await until_gone(pid, template)


@pytest.mark.parametrize(
    ("overrides", "environment", "forks"),
    [
        ((), {"CUDA_VISIBLE_DEVICES": ""}, True),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, False),
        (("actor_rollout_ref.rollout.name=vllm",), {"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_services_are_forked_where_all_compute_on_the_cpu_with_the_embedded_engine(
    overrides: tuple[str, ...], environment: dict[str, str], forks: bool
) -> None:
    engine = ("actor_rollout_ref.rollout.name=torch",)
    host = this_machine(load_config(None, [*engine, *overrides]), environment)
    assert isinstance(host, ForkingMachine) is forks
