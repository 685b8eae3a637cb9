"""A sandbox that fails is an error of the machine, never a program's result."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence

import pytest

from services.reward.grading.scorers import program_runner
from services.reward.grading.scorers.program_tests import ProgramTests
from sluice.errors import SandboxUnavailableError
from sluice.sandbox.choice import CommandSandbox
from sluice.sandbox.contained import Containment, run_contained
from sluice.sandbox.interpreter import Interpreter
from sluice.sandbox.run_result import NO_FILES, Limits, Result, SandboxEnd

_TESTS = '{"inputs": ["1"], "outputs": ["1"]}'
_MANY = json.dumps({"inputs": ["1"] * 12, "outputs": ["1"] * 12})


class Fixed:
    """A sandbox whose runs end as given, one after the other."""

    def __init__(self, *results: Result) -> None:
        self._results = list(results)

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, str] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Result:
        return self._results.pop(0)


def _interpreter(script: str, wall_s: float = 10.0) -> Interpreter:
    command = ["/bin/sh", "-c", script, "sh"]
    limits = Limits(wall_s=wall_s)
    return Interpreter(CommandSandbox(command, limits, sys.executable), limits)


def _answers(numbers: range, end: str = program_runner.FINISHED) -> bytes:
    lines = [f'{{"test": {i}, "end": "{end}", "output": "1"}}' for i in numbers]
    return "\n".join([program_runner.STARTED, *lines, ""]).encode()


@pytest.mark.parametrize("end", list(SandboxEnd))
def test_tests_that_never_started_are_the_sandboxs_failure_whatever_the_end(
    end: SandboxEnd,
) -> None:
    grade = ProgramTests(Fixed(Result(end, None, b"", b"")), Limits(), 10.0)

    with pytest.raises(SandboxUnavailableError, match="did not start the tests"):
        grade("print(1)", _TESTS)


@pytest.mark.parametrize(
    "later", [_answers(range(2), program_runner.TIMED_OUT), _answers(range(1))]
)
def test_a_later_test_without_an_answer_counts_as_one_that_failed(later: bytes) -> None:
    first = Result(SandboxEnd.FINISHED, 0, _answers(range(10)), b"")
    grade = ProgramTests(Fixed(first, Result(SandboxEnd.FINISHED, 0, later, b"")), Limits(), 10.0)

    assert grade("print(1)", _MANY) == pytest.approx(10 / 11)


@pytest.mark.parametrize("script", ["echo no daemon >&2; exit 125", "echo no daemon; exit 1"])
def test_a_command_that_ends_before_python_starts_is_an_error_not_output(script: str) -> None:
    with pytest.raises(SandboxUnavailableError, match="did not start: no daemon"):
        _interpreter(script).run("print(1)")


def test_a_command_may_say_something_before_python_starts() -> None:
    interpreter = _interpreter('echo up >&2; exec "$@"')
    try:
        assert interpreter.run("print(1)").output == "1\n"
        assert interpreter.run("print(2)").output == "2\n"
    finally:
        interpreter.close()


@pytest.mark.parametrize("before", ["", "epoll_wait error"])
def test_what_is_said_before_the_sandbox_is_ready_is_not_the_programs(before: str) -> None:
    """A thread of this process may log into the stream of its fork."""
    script = f"printf %s '{before}' >&2; echo 'sluice: ready' >&2; printf late >&2; exit 3"
    containment = Containment(["/bin/sh", "-c", script], announces_ready=True)
    found = run_contained(containment, b"", Limits())
    assert found == Result(SandboxEnd.FINISHED, 3, b"", b"late")


def test_a_wrapper_that_never_gets_ready_is_the_sandboxs_failure() -> None:
    containment = Containment(["/bin/sh", "-c", "echo no disk >&2"], announces_ready=True)
    with pytest.raises(SandboxUnavailableError, match="before the program: no disk"):
        run_contained(containment, b"", Limits())


def test_a_commands_time_limit_is_not_that_of_one_call() -> None:
    interpreter = _interpreter('test {wall_s} -ge 3600 && exec "$@"')
    try:
        assert interpreter.run("print(1)").output == "1\n"
    finally:
        interpreter.close()


def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)

    with pytest.raises(SandboxUnavailableError, match="Too many open files"):
        _interpreter("exec sleep 1000").run("print(1)")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
