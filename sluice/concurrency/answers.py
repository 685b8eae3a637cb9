"""Ask a module in a process of its own, such as a service's code; launchers do not import it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from sluice.concurrency.process import ending_text
from sluice.errors import ConfigError

AskedT = TypeVar("AskedT")
AnswerT = TypeVar("AnswerT")

_ERROR = "sluice: ERROR "


def ask_module(
    module: str, request: object, kind: type[AnswerT], *, task: str, timeout_s: float, remedy: str
) -> tuple[AnswerT, str]:
    """Run a module (``python -m``), give it a message, and return its answer and what it printed.

    Errors hold `task` it does and the `remedy` for one that takes longer than `timeout_s`.

    Raises:
        ConfigError: it reported an error, crashed, was killed, or took too long.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", module],
            input=msgspec.msgpack.encode(request),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{task} took more than {timeout_s:g} s; {remedy}") from error
    printed = process.stderr.decode(errors="replace").strip()
    if process.returncode == 0:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(process.stdout, type=kind), printed
    if process.returncode > 0 and _ERROR in printed:
        raise ConfigError(printed.rpartition(_ERROR)[2])
    ending = f": {printed.splitlines()[-1]}" if printed else " and printed nothing"
    is_killed = process.returncode < 0
    advice = "look whether this machine has the memory for it" if is_killed else "correct the cause"
    raise ConfigError(
        f"{task}: its process ended with {ending_text(process.returncode)}{ending}; {advice}, and "
        "try again"
    )


def serve_answer(kind: type[AskedT], answer: Callable[[AskedT], object]) -> None:
    """Read the message of `ask_module`, and write the answer; all that is printed is an error."""
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=kind)
    standard_output = os.dup(1)
    os.dup2(2, 1)
    content = msgspec.msgpack.encode(answer(request))
    with os.fdopen(standard_output, "wb") as stream:
        stream.write(content)
