"""The run of all tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_checks

ENDS_ITS_PROCESS_ONCE = """
import os
from pathlib import Path

def test_that_ends_its_process():
    mark = Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        os._exit(1)
"""


def test_a_test_that_ends_its_worker_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(run_checks, "LIMIT_S", 120.0)
    for number, num_tests in enumerate((2, 4)):
        tests = "".join(f"def test_{one}(): pass\n" for one in range(num_tests))
        (tmp_path / f"test_{number}.py").write_text(tests, encoding="utf-8")
    (tmp_path / "test_2.py").write_text(ENDS_ITS_PROCESS_ONCE, encoding="utf-8")
    done = run_checks.run_tests("tests", [str(tmp_path)], 0, shows=False)
    assert (done.passed, done.counts["failed"]) == (False, 1)
    assert "crashed while running" in done.output
    assert "test_that_ends_its_process" in done.output
    assert "did not end" not in done.output


HANGS_AFTER_ITS_FAILURE = """
import time
import pytest

@pytest.fixture
def hanging():
    yield
    time.sleep(600)

def test_that_fails(hanging):
    assert False
"""


def test_a_teardown_that_hangs_after_a_failure_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checks, "LIMIT_S", 120.0)
    hook = "from tests.conftest import pytest_configure, pytest_exception_interact\n"
    (tmp_path / "conftest.py").write_text(hook, encoding="utf-8")
    (tmp_path / "test_0.py").write_text(HANGS_AFTER_ITS_FAILURE, encoding="utf-8")
    limit = ("-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true")
    done = run_checks.run_tests("tests", [str(tmp_path), *limit], 0, shows=False)
    assert not done.passed
    assert "in hanging" in done.output
    assert "did not end" not in done.output


def test_a_check_that_hangs_is_ended_where_nothing_tells_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_text(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(run_checks, "LIMIT_S", 0.1)
    monkeypatch.setattr(Path, "read_text", read_text)
    done = run_checks.run_command("hangs", [sys.executable, "-c", "import time; time.sleep(600)"])
    assert not done.passed
    assert "did not end" in done.output


def test_an_interrupt_ends_the_check_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    wait = subprocess.Popen.wait

    def interrupted(running: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if running in started:
            return wait(running, timeout)
        started.append(running)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_checks.run_command("hangs", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert wait(started[0], 30) != 0


RUNS_ONE_CHECK = """
import sys
from tools import run_checks

waits = "import time; print('up', flush=True); time.sleep(60)"
starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"
run_checks.STATIC = (("waits", (sys.executable, "-c", starts)), ("next", ("false",)))
run_command = run_checks.run_command
run_checks.run_command = lambda name, command: run_command(name, command, shows=True)
sys.argv = ["run_checks", "--static"]
sys.exit(run_checks.main())
"""


def test_a_signal_to_end_ends_every_check_and_what_it_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUNS_ONE_CHECK], cwd=run_checks.ROOT, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert any(line == b"up\n" for line in run.stdout)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=30)  # returns once all processes that write there have ended
        assert run.returncode == 128 + signal.SIGTERM
