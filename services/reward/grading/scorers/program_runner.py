"""Run a program on test inputs inside a sandbox, and write its answers.

The sandbox gets only this file of sluice, as text, so it imports only the standard library. It
knows no expected output: whatever a program does to it, it can only spoil the program's own
answers. Input is a `Job` as JSON; output is `STARTED` and a line of JSON for each test.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import types
from contextlib import suppress
from typing import Any, TypedDict

STARTED = "runner started"
FINISHED, FAILED, TIMED_OUT = "finished", "failed", "timed out"
# Names that programs for these data sets may use without importing them.
PREAMBLE = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json
sys.setrecursionlimit(6 * 10**5)
"""
_LOOK_S = 0.02
_CHUNK_BYTES = 1 << 16


class Job(TypedDict):
    """A program and its tests.

    `inputs` are texts for standard input or, for a function `fn_name`, its arguments as JSON, one a
    line. All tests share `total_s` seconds; each has at most `test_s`.
    """

    program: str
    fn_name: str | None
    inputs: list[Any]
    total_s: float
    test_s: float
    output_bytes: int


def main() -> None:
    """Read the job from standard input and answer it."""
    job: Job = json.load(sys.stdin)
    ends_s = time.monotonic() + job["total_s"]
    namespace: dict[str, object] = {}
    exec(PREAMBLE, namespace)  # noqa: S102 - imports once what every test's process then has
    _print_line(STARTED)
    num_tests = len(job["inputs"])
    for test, test_input in enumerate(job["inputs"]):
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            break
        # An even share of the remaining time: a program that hangs on one test may solve others.
        end, output = run_test(job, test_input, min(job["test_s"], left_s / (num_tests - test)))
        _print_line(json.dumps({"test": test, "end": end, "output": output}, ensure_ascii=False))


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_test(job: Job, test_input: object, limit_s: float) -> tuple[str, str]:
    """Run the program once, in a separate process; return how it ended and its answer."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as file:
        if job["fn_name"] is None:
            text = "\n".join(test_input) if isinstance(test_input, list) else str(test_input)
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        child = os.fork()
        if child == 0:
            _become_program(job, test_input, file.fileno(), writer)
        os.close(writer)
        try:
            return _answer(child, reader, limit_s, job["output_bytes"])
        finally:
            os.close(reader)


def _answer(child: int, reader: int, limit_s: float, max_bytes: int) -> tuple[str, str]:
    ends_s, output, status = time.monotonic() + limit_s, bytearray(), None
    while len(output) <= max_bytes and time.monotonic() < ends_s:
        if select.select([reader], [], [], _LOOK_S)[0]:
            chunk = os.read(reader, _CHUNK_BYTES)
            output += chunk
            if chunk:
                continue
            time.sleep(_LOOK_S / 20)  # it closed its output and will end soon
        elif status is not None:
            break  # it has ended, and a process that it started holds the pipe
        if status is None:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = code if pid else None
        elif not chunk:
            break
    timed_out = status is None
    _end(child, timed_out)
    if len(output) > max_bytes:
        return FAILED, ""
    if timed_out:
        return TIMED_OUT, ""
    return FINISHED if status == 0 else FAILED, output.decode("utf-8", "replace")


def _end(child: int, is_running: bool) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if is_running:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become_program(job: Job, test_input: object, file: int, writer: int) -> None:
    """Become the program; never return."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        is_call = job["fn_name"] is not None
        os.dup2(null if is_call else file, 0)
        os.dup2(null if is_call else writer, 1)
        os.dup2(null, 2)
        sys.stdin, sys.stdout = streams = open(0), open(1, "w")  # noqa: SIM115 - as a script's, with modes
        namespace = _module("solution" if is_call else "__main__")
        if is_call:
            result = _call_function(job, test_input, namespace)
            with os.fdopen(writer, "w", encoding="utf-8") as answer:
                json.dump(result, answer)
        else:
            _run_script(job["program"], namespace)
        for stream in filter(None, (sys.stdout, streams[1], sys.__stdout__)):
            with suppress(ValueError):  # the program has closed it, or put another in its place
                stream.flush()
        code = 0
    finally:
        os._exit(code)


def _module(name: str) -> dict[str, Any]:
    """Return the names of a new module, with those of the preamble."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(PREAMBLE, module.__dict__)  # noqa: S102
    return module.__dict__


def _run_script(program: str, namespace: dict[str, Any]) -> None:
    builtins.open = namespace["open"] = _open_or_input
    with suppress(SystemExit):
        exec(compile(program, "main.py", "exec"), namespace)  # noqa: S102 - what the sandbox is for
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # programs print collected results there


_OPEN: Any = builtins.open


def _open_or_input(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as open
    """Open a file; a missing file that is read, such as input.txt, holds the test's input."""
    try:
        return _OPEN(file, mode, *args, **kwargs)
    except FileNotFoundError:
        if "r" not in mode:
            raise
        return _OPEN(0, mode, *args, closefd=False, **kwargs)


def _call_function(job: Job, test_input: object, namespace: dict[str, Any]) -> object:
    """Return what the function returns; tuples become lists on their way out."""
    program, name = job["program"], job["fn_name"] or ""
    namespace.pop(name, None)  # the preamble's own, such as add
    exec(compile(program, "main.py", "exec"), namespace)  # noqa: S102 - what the sandbox is for
    lines = test_input.split("\n") if isinstance(test_input, str) else None
    arguments: Any = test_input if lines is None else [json.loads(line) for line in lines]
    if arguments and isinstance(arguments[0], dict):
        # JSON has text for keys.
        with suppress(ValueError):
            arguments = [{int(key): value for key, value in arguments[0].items()}]
    owner = namespace["Solution"]() if "class Solution" in program else None
    function = namespace[name] if owner is None else getattr(owner, name)
    return function(*arguments)


if __name__ == "__main__":
    main()
