"""The supervisor with small scripted processes: ends, restarts, signals, nothing left running."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.concurrency.process import EXIT_MISSING_PACKAGE
from sluice.launch.processes import supervisor as supervisor_module
from sluice.launch.service_spec import RESTARTS_AFTER_ERRORS_TOO, ServiceSpec
from tests.support.scripted_children import (
    POLITE,
    SLEEP,
    STUBBORN,
    WAIT_S,
    Supervised,
    end_self,
    is_alive,
    open_gate,
    polite,
    spec,
    until_gone,
)
from tests.support.source_tree import ROOT


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.01)


async def test_the_run_ends_with_the_process_that_ends_it_and_takes_the_others_along(
    tmp_path: Path,
) -> None:
    waits = "import sys; open(sys.argv[1]).read()"
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    trainer = ServiceSpec("trainer", (sys.executable, "-c", waits, str(gate)), ends_run=True)
    run = Supervised(tmp_path, polite("reward"), polite("rollout-0"), trainer)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until(lambda: len(run.lines) == 2)
        await open_gate(gate)
    end = ending.result()
    assert (end.exit_code, end.failures) == (0, ())
    assert run.said("reward") == run.said("rollout-0") == ["ready", "bye"]
    await until_gone(*run.pids)


async def test_every_line_goes_to_the_log_of_its_process_and_to_the_caller(tmp_path: Path) -> None:
    talk = """
    import sys
    print("ready")
    print("to stderr", file=sys.stderr)
    print("no newline", end="")
    """
    run = Supervised(tmp_path / "logs", spec("trainer", talk, ends_run=True))
    await run.run()
    assert sorted(run.said("trainer")) == ["no newline", "ready", "to stderr"]
    logged = (tmp_path / "logs" / "trainer.log").read_text().splitlines()
    assert logged == run.said("trainer")


async def test_a_line_of_any_length_and_bytes_that_are_no_text_do_not_end_the_run(
    tmp_path: Path,
) -> None:
    talk = "import sys; sys.stdout.buffer.write(b'x' * 3_000_000 + b'\\n\\xff\\nready\\n')"
    run = Supervised(tmp_path, spec("trainer", talk, ends_run=True))
    assert (await run.run()).exit_code == 0
    assert run.said("trainer")[-2:] == ["\N{REPLACEMENT CHARACTER}", "ready"]


async def test_a_failure_ends_the_run_with_its_last_lines_and_exit_code_1(tmp_path: Path) -> None:
    fails = spec("reward", "print('ready'); print('config: port 7 is in use'); raise SystemExit(3)")
    run = Supervised(tmp_path, fails, polite("rollout-0"))
    end = await run.run()
    assert end.exit_code == 1
    assert end.failures == ("reward ended with code 3:\n  ready\n  config: port 7 is in use",)
    await until_gone(*run.pids)


async def test_a_needed_process_that_leaves_in_order_in_the_middle_of_the_run_is_a_failure(
    tmp_path: Path,
) -> None:
    leaves = spec("reward", "print('ready'); print('draining')", is_needed=True)
    end = await Supervised(tmp_path, leaves, polite("rollout-0")).run()
    assert end.exit_code == 1
    assert end.failures == (
        "reward ended with code 0 in the middle of the run:\n  ready\n  draining",
    )


async def test_a_process_whose_package_is_missing_is_not_started_again(tmp_path: Path) -> None:
    lacks = f"print('ready'); raise SystemExit({EXIT_MISSING_PACKAGE})"
    command = spec("rollout-0", lacks).command
    replica = ServiceSpec("rollout-0", command, restarts=RESTARTS_AFTER_ERRORS_TOO)
    run = Supervised(tmp_path, replica, polite("reward"))
    end = await run.run()
    assert end.exit_code == 1
    assert run.said("rollout-0") == ["ready"]


async def test_a_needed_process_that_leaves_when_the_run_is_over_is_none(tmp_path: Path) -> None:
    reward = ServiceSpec("reward", polite("reward").command, is_needed=True)
    run = Supervised(tmp_path, reward, spec("trainer", "print('ready')", ends_run=True))
    assert (await run.run()).exit_code == 0


async def test_a_process_that_may_restart_is_started_again_and_the_run_continues(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "mark"
    once = f"""
    import os, pathlib, sys
    mark = pathlib.Path({str(mark)!r})
    if not mark.exists():
        mark.write_text("")
        sys.exit(5)
    print("again")
    import time; time.sleep(600)
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    waits = (sys.executable, "-c", "import sys; open(sys.argv[1]).read()", str(gate))
    run = Supervised(
        tmp_path,
        spec("rollout-0", once, max_restarts=1),
        ServiceSpec("trainer", waits, ends_run=True),
    )
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until(lambda: run.said("rollout-0") == ["again"])
        await open_gate(gate)
    assert ending.result().exit_code == 0


async def test_a_process_whose_errors_are_final_is_started_again_only_after_a_signal(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "mark"
    dies_then_refuses = f"""
    import os, pathlib, sys
    mark = pathlib.Path({str(mark)!r})
    if not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), 9)
    print("config: port 7 is in use")
    sys.exit(1)
    """
    reward = spec("reward", dies_then_refuses, max_restarts=5, retries_errors=False)
    end = await Supervised(tmp_path, reward).run()
    assert end.failures == (
        "reward ended with code 1 after 1 restarts:\n  config: port 7 is in use",
    )


async def test_a_process_that_lived_long_enough_is_no_crash_loop(tmp_path: Path) -> None:
    dies_thrice = f"""
    import pathlib, sys, time
    starts = pathlib.Path({str(tmp_path / "starts")!r})
    starts.touch()
    with starts.open("a") as file:
        file.write("x")
    if len(starts.read_text()) <= 3:
        sys.exit(9)
    print("ready")
    time.sleep(600)
    """
    dying = spec("rollout-0", dies_thrice, max_restarts=1)
    restarts = replace(dying.restarts, stable_s=0.0)
    run = Supervised(tmp_path, replace(dying, restarts=restarts))
    end = await run.run(end_self(signal.SIGINT))
    assert (end.exit_code, end.failures) == (130, ())


async def test_a_process_that_lived_longer_than_the_pause_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pause is from start to start: it slows down a crash loop, and no recovery."""
    dies = "import sys; sys.exit(9)"
    for first_pause_s, said in ((1e-9, "starting again at once"), (600.0, "starting again in ")):
        monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", first_pause_s)
        caplog.clear()
        run = Supervised(tmp_path, spec("rollout-0", dies, max_restarts=100_000), polite("reward"))
        async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(run.supervisor.run())
            await run.until(lambda run=run: bool(run.said("reward")))  # type: ignore[misc]
            while "starting again" not in caplog.text:
                await asyncio.sleep(0.01)
            run.supervisor.end()
        assert said in caplog.text


async def test_a_signal_that_ended_a_process_is_named(tmp_path: Path) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    end = await Supervised(tmp_path, spec("trainer", dies)).run()
    assert end.failures == ("trainer ended with SIGSEGV",)


async def test_a_process_that_the_machine_cannot_start_at_present_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin, refusals = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "no process is free")]

    async def refuses_once(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if refusals and "rollout" in command[-1]:
            raise refusals.pop()
        return await begin(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses_once)
    mark = tmp_path / "mark"
    replica = f"open({str(mark)!r}, 'w'); print('rollout'); import time; time.sleep(600)"
    waits = f"import os, time\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.01)"
    run = Supervised(
        tmp_path, spec("rollout-0", replica, max_restarts=1), spec("trainer", waits, ends_run=True)
    )
    end = await run.run()
    assert (end.exit_code, end.failures) == (0, ())
    assert "rollout-0 cannot be started at present: " in caplog.text


async def test_a_program_that_does_not_exist_is_one_clear_failure(tmp_path: Path) -> None:
    missing = ServiceSpec("reward", ("/no/such/program",))
    run = Supervised(tmp_path, polite("rollout-0"), missing)
    end = await run.run()
    assert end.exit_code == 1
    assert end.failures == (
        "reward: /no/such/program cannot be started (No such file or directory)",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_one_signal_ends_everything_in_order_with_130(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = Supervised(tmp_path, polite("reward"), polite("trainer"), polite("rollout-0"))
    end = await run.run(when_ready=end_self(number))
    assert (end.exit_code, end.failures) == (130, ())
    assert all(run.said(name) == ["ready", "bye"] for name in ("reward", "trainer", "rollout-0"))
    await until_gone(*run.pids)


def saving(tmp_path: Path, then: str) -> tuple[str, Callable[[], Coroutine[Any, Any, bool]]]:
    """A trainer's program that runs `then` once it is asked to save, and what asks it."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def save() -> bool:
        await open_gate(gate)
        return True

    return f"print('ready'); open({str(gate)!r}).read(); {then}", save


async def test_the_first_interrupt_lets_the_run_save_and_reach_its_end(tmp_path: Path) -> None:
    trains, save = saving(tmp_path, "print('saved')")
    run = Supervised(
        tmp_path / "logs", polite("reward"), spec("trainer", trains, ends_run=True), save=save
    )
    end = await run.run(when_ready=end_self(signal.SIGINT))
    assert (end.exit_code, end.failures) == (130, ())
    assert run.said("trainer") == ["ready", "saved"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_second_signal_ends_a_run_that_saves_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def save() -> bool:
        end_self(number)()
        return True

    trainer = spec("trainer", POLITE.format(code=0), ends_run=True)
    run = Supervised(tmp_path, polite("reward"), trainer, save=save)
    end = await run.run(when_ready=end_self(signal.SIGINT))
    assert (end.exit_code, end.failures) == (130, ())
    assert run.said("trainer") == ["ready", "bye"]


async def test_an_interrupt_of_a_run_that_cannot_save_ends_it_at_once(tmp_path: Path) -> None:
    async def save() -> bool:
        return False

    run = Supervised(tmp_path, polite("reward"), polite("trainer"), save=save)
    assert (await run.run(when_ready=end_self(signal.SIGINT))).exit_code == 130


async def test_a_trainer_that_fails_while_it_saves_is_not_started_again(tmp_path: Path) -> None:
    fails, save = saving(tmp_path, "raise SystemExit(7)")
    trainer = spec("trainer", fails, max_restarts=3, ends_run=True)
    end = await Supervised(tmp_path / "logs", trainer, save=save).run(end_self(signal.SIGINT))
    assert end.exit_code == 1
    assert end.failures == ("trainer ended with code 7:\n  ready",)


async def test_processes_that_have_no_handler_yet_may_die_of_the_signal(tmp_path: Path) -> None:
    run = Supervised(tmp_path, spec("trainer", SLEEP))
    assert (await run.run(when_ready=end_self(signal.SIGINT))).exit_code == 130


LATE = "did not end within {:g} s and was killed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_run_whose_trainer_had_to_be_killed_did_not_fail(
    tmp_path: Path,
    number: int,
    caplog: pytest.LogCaptureFixture,
    skip_time: Callable[[float], None],
) -> None:
    run = Supervised(tmp_path, polite("reward"), spec("trainer", STUBBORN), grace_s=600.0)
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.supervisor.run())
        await run.until_ready()
        end_self(number)()
        # The other one ends in its own time.
        while run.supervisor.pid_of("reward") is not None:
            await asyncio.sleep(0.01)
        skip_time(600.0)
    end = ending.result()
    assert (end.exit_code, end.failures) == (130, ())
    assert f"trainer {LATE.format(600)}" in caplog.text
    assert run.said("reward") == ["ready", "bye"]
    await until_gone(*run.pids)


async def test_a_run_that_ended_fails_if_a_process_had_to_be_killed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    trainer = spec("trainer", f"print('ready'); open({str(gate)!r}).read()", ends_run=True)
    run = Supervised(tmp_path / "logs", spec("reward", STUBBORN), trainer, grace_s=2.0)
    end = await run.run(when_ready=lambda: gate.write_text("go"))
    assert (end.exit_code, end.failures) == (1, (f"reward {LATE.format(2)}",))
    await until_gone(*run.pids)


async def test_a_process_that_fails_while_it_ends_spoils_the_exit_code(tmp_path: Path) -> None:
    run = Supervised(tmp_path, polite("reward", code=4))
    end = await run.run(when_ready=end_self(signal.SIGINT))
    assert end.exit_code == 1
    assert end.failures == ("reward ended with code 4:\n  ready\n  bye",)


GRANDPARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(child.pid)
"""


async def test_a_dead_process_is_noticed_while_its_own_child_holds_the_output(
    tmp_path: Path,
) -> None:
    run = Supervised(tmp_path, spec("reward", GRANDPARENT + "raise SystemExit(2)"))
    end = await run.run()
    assert end.failures[0].startswith("reward ended with code 2")
    grandchild = int(next(line for line in run.said("reward") if line.isdigit()))
    await until_gone(grandchild)


async def test_cancelling_the_supervisor_leaves_nothing_running(tmp_path: Path) -> None:
    run = Supervised(tmp_path, polite("reward"), spec("trainer", STUBBORN), grace_s=0.3)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.supervisor.run())
        await run.until_ready()
        assert len(run.pids) == 2
        running.cancel()
    assert running.cancelled()
    await until_gone(*run.pids)


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from sluice.launch.service_spec import RESTARTS_AFTER_ERRORS_TOO, ServiceSpec
from sluice.launch.processes.supervisor import Supervisor
child = '''
import os, time
from sluice.concurrency.process import end_with_supervisor
end_with_supervisor()
print(os.getpid())
time.sleep(600)
'''
specs = [ServiceSpec(f"s{i}", (sys.executable, "-c", child)) for i in range(2)]
say = lambda name, line: print(line, flush=True)
asyncio.run(Supervisor(specs, Path(sys.argv[1]), say, 5).run())
"""


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        pids = [int(output.readline()) for _ in range(2)]
        assert all(map(is_alive, pids))
        process.kill()
        await until_gone(*pids)


def test_a_supervised_process_whose_supervisor_is_gone_ends_at_once() -> None:
    code = "from sluice.concurrency.process import end_with_supervisor as e; e(); print('lives')"
    for pid, lives in ((str(os.getpid()), True), ("1", False), (None, True)):
        environment = {key: v for key, v in os.environ.items() if key != "SLUICE_SUPERVISOR_PID"}
        if pid is not None:
            environment["SLUICE_SUPERVISOR_PID"] = pid
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert (done.returncode == 0) is lives
        assert (b"lives" in done.stdout) is lives
