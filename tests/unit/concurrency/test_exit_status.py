"""How a program's body ends as an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.concurrency.process import exit_status, run_and_exit
from sluice.errors import ConfigError, DataError, leaves


def raising(error: BaseException) -> object:
    raise error


def test_a_body_that_returns_gives_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("x", lambda: None) == 0
    assert capsys.readouterr().err == ""


def test_an_error_of_ours_is_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("trainer", lambda: raising(ConfigError("key a: 7; use 5"))) == 1
    assert capsys.readouterr().err == "trainer: ERROR key a: 7; use 5\n"


def test_grouped_errors_of_ours_are_a_line_each_and_repeats_are_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inner = ExceptionGroup("inner", [DataError("b"), ConfigError("a")])
    assert exit_status("x", lambda: raising(ExceptionGroup("o", [ConfigError("a"), inner]))) == 1
    assert capsys.readouterr().err == "x: ERROR a\nx: ERROR b\n"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_status("x", lambda: raising(ZeroDivisionError()))


def test_a_defect_beside_errors_of_ours_keeps_the_whole_group() -> None:
    group = ExceptionGroup("g", [ConfigError("a"), ZeroDivisionError()])
    with pytest.raises(ExceptionGroup) as caught:
        exit_status("x", lambda: raising(group))
    assert caught.value is group


class Held:
    """As a process group of torch, whose end may wait for a peer."""


def test_what_an_errors_frames_hold_is_not_freed_while_the_process_ends() -> None:
    held: list[weakref.ref[Held]] = []

    def run() -> None:
        group = Held()
        held.append(weakref.ref(group))
        raise ConfigError("a")

    assert exit_status("x", run) == 1
    assert held[0]() is not None


def test_leaves_come_in_order_from_all_depths() -> None:
    first, second, third = ValueError(1), KeyError(2), TypeError(3)
    nested = BaseExceptionGroup("a", [first, BaseExceptionGroup("b", [second]), third])
    assert leaves(nested) == [first, second, third]


def test_control_characters_of_an_error_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run() -> None:
        raise ConfigError("KeyError: '\x1b[2J\x1b]0;title\a'")

    assert exit_status("sluice", run) == 1
    assert capsys.readouterr().err == "sluice: ERROR KeyError: '\\x1b[2J\\x1b]0;title\\x07'\n"


class Ended(BaseException):
    """What stands for the end of the process."""


@pytest.mark.parametrize(("body", "code"), [(lambda: 5, 5), (lambda: 1 // 0, 1)])
def test_a_service_ends_at_once_with_its_code_and_after_a_defect_with_its_traceback(
    body: Callable[[], int],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(found: int) -> None:
        raise Ended(found)

    monkeypatch.setattr("sluice.concurrency.process.os._exit", end)
    monkeypatch.setattr("sluice.concurrency.process.logging.shutdown", lambda: None)
    with pytest.raises(Ended, match=f"^{code}$"):
        run_and_exit(body)
    assert ("ZeroDivisionError" in capsys.readouterr().err) == (code == 1)


DEFECTS = {
    "an error": "ValueError('\\x1b[2J')",
    "an interruption beside an error": "BaseExceptionGroup('g', [SystemExit(), ValueError()])",
}


def left(error: str, marker: Path, stderr: int) -> subprocess.CompletedProcess[str]:
    """A process that raises in `run_and_exit`.

    The interpreter's own end would make `marker`, and so would the end of what the error holds.
    """
    program = (
        "import atexit, pathlib\n"
        "from sluice.concurrency.process import run_and_exit\n"
        f"mark = pathlib.Path({str(marker)!r}).touch\n"
        "atexit.register(mark)\n"
        "class Held:\n    def __del__(self):\n        mark()\n"
        f"def main():\n    held = Held()\n    raise {error}\n"
        "run_and_exit(main)\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, stderr=stderr, text=True, timeout=60.0, check=False)


@pytest.mark.parametrize("error", DEFECTS.values(), ids=DEFECTS.keys())
def test_a_defect_ends_a_service_at_once_and_sends_nothing_that_a_terminal_would_obey(
    error: str, tmp_path: Path
) -> None:
    ended = left(error, tmp_path / "marker", subprocess.PIPE)
    assert (ended.returncode, (tmp_path / "marker").exists()) == (1, False)
    assert "ValueError" in ended.stderr
    assert "\x1b" not in ended.stderr


@pytest.mark.parametrize("where", ["a full disk", "a broken pipe"])
def test_a_defect_that_cannot_be_printed_ends_a_service_at_once(where: str, tmp_path: Path) -> None:
    if where == "a full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        read_end, stderr = os.pipe()
        os.close(read_end)
    try:
        ended = left(DEFECTS["an error"], tmp_path / "marker", stderr)
    finally:
        os.close(stderr)
    assert (ended.returncode, (tmp_path / "marker").exists()) == (1, False)
