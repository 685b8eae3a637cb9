"""What is known of a service's process from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.concurrency.process import ProcessMark, mark_file, mark_process, process_marks

WAIT_S = 60.0


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], ProcessMark]]:
    """A process that has marked itself and sleeps."""
    code = (
        "import pathlib, time\n"
        "from sluice.concurrency.process import mark_process\n"
        f"with mark_process(pathlib.Path({str(tmp_path)!r}), 'rollout-1', '127.0.0.1:7'):\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process, until_marked(tmp_path)
        finally:
            process.kill()


def until_marked(run_dir: Path) -> ProcessMark:
    ends_s = time.monotonic() + WAIT_S
    while not (marks := process_marks(run_dir)):
        assert time.monotonic() < ends_s
        time.sleep(0.02)
    return marks[0]


def until_state(mark: ProcessMark, state: str) -> None:
    ends_s = time.monotonic() + WAIT_S
    while mark.state() != state:
        assert time.monotonic() < ends_s, mark.state()
        time.sleep(0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_mark_tells_its_machine_and_the_namespace_of_its_process_id(tmp_path: Path) -> None:
    with mark_process(tmp_path, "trainer"):
        (mark,) = process_marks(tmp_path)
    assert mark.host == f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def test_a_process_that_proc_hides_may_live(
    sleeper: tuple[subprocess.Popen[bytes], ProcessMark], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, mark = sleeper
    monkeypatch.setattr("sluice.concurrency.process.stat_fields", lambda _: [])
    assert mark.state() == "unknown"
    process.kill()
    process.wait()
    assert mark.state() == "gone"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_state_of_a_process_is_the_kernels(
    sleeper: tuple[subprocess.Popen[bytes], ProcessMark],
) -> None:
    process, mark = sleeper
    assert (mark.name, mark.pid, mark.address) == ("rollout-1", process.pid, "127.0.0.1:7")
    until_state(mark, "alive")
    os.kill(process.pid, signal.SIGSTOP)
    until_state(mark, "stopped by a signal")
    os.kill(process.pid, signal.SIGKILL)
    until_state(mark, "a zombie")
    process.wait(WAIT_S)
    assert mark.state() == "gone"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_another_process_with_the_same_id_is_not_taken_for_it(tmp_path: Path) -> None:
    with mark_process(tmp_path, "trainer"):
        (mark,) = process_marks(tmp_path)
    assert mark.state() == "alive"
    assert replace(mark, started=mark.started + 1).state() == "gone"


def test_a_process_elsewhere_is_out_of_sight(tmp_path: Path) -> None:
    with mark_process(tmp_path, "trainer"):
        (mark,) = process_marks(tmp_path)
    assert replace(mark, host="other pid:[1]").state() == "out of sight on other"


def test_a_mark_is_left_by_those_who_could_not_end_in_order_only(tmp_path: Path) -> None:
    with mark_process(tmp_path, "trainer"):
        assert [mark.name for mark in process_marks(tmp_path)] == ["trainer"]
    assert process_marks(tmp_path) == ()


def test_marks_of_an_earlier_run_and_files_that_are_none_are_left_out(tmp_path: Path) -> None:
    with mark_process(tmp_path, "trainer"), mark_process(tmp_path, "rollout-2"):
        os.utime(tmp_path / "processes" / "rollout-2.json", (1.0, 1.0))
        (tmp_path / "processes" / "rollout-3.json").write_text("{", encoding="utf-8")
        assert [mark.name for mark in process_marks(tmp_path, since_s=2.0)] == ["trainer"]


@pytest.mark.parametrize("pid", [None, "7", 0, -1, 2**31, 2**80])
def test_a_damaged_mark_is_no_process(tmp_path: Path, pid: object) -> None:
    with mark_process(tmp_path, "trainer"):
        file = mark_file(tmp_path, "trainer")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": pid}), encoding="utf-8")
        assert process_marks(tmp_path) == ()


def test_a_mark_with_fields_of_another_version_is_read(tmp_path: Path) -> None:
    with mark_process(tmp_path, "trainer"):
        marks, file = process_marks(tmp_path), mark_file(tmp_path, "trainer")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"later": 1}), encoding="utf-8")
        assert process_marks(tmp_path) == marks


def test_without_the_runs_folder_nothing_is_written(tmp_path: Path) -> None:
    with mark_process(tmp_path / "elsewhere", "rollout-0"):
        assert list(tmp_path.iterdir()) == []
