"""Processes that start from one that has imported their module already, in milliseconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

_CONTEXT = multiprocessing.get_context("forkserver")
# Torch, transformers, trainer and engine, once for each process of pytest.
_CONTEXT.set_forkserver_preload(
    ["tests.support.rank_peer", "tests.support.replica_process", "tests.support.causal_lms"]
)


class PreloadedProcess:
    """A process of ``python -m MODULE ARGUMENTS`` with pipes, as `subprocess.Popen` has them.

    The first one of a test process waits for the imports; the others are forks of that state. They
    end without the interpreter's end, so a rule about that needs a process of its own.

    Args:
        module: has a `main` that returns the exit status; preloaded, or it is imported then.
        arguments: of its command line.
        environment: on top of this process's.
    """

    def __init__(self, module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        its_input, own_input = _CONTEXT.Pipe(duplex=False)
        own_output, its_output = _CONTEXT.Pipe(duplex=False)
        its_errors = Connection(os.dup(2), readable=False)
        streams = (its_input, its_output, its_errors)
        self._process = _CONTEXT.Process(
            target=_run, args=(module, arguments, dict(environment), streams), daemon=True
        )
        self._process.start()
        for stream in streams:
            stream.close()
        self.stdin = os.fdopen(os.dup(own_input.fileno()), "w", encoding="utf-8")
        self.stdout = os.fdopen(os.dup(own_output.fileno()), encoding="utf-8")
        own_input.close()
        own_output.close()

    def wait(self, timeout_s: float) -> int:
        """Return the exit status, negative for a signal; raise TimeoutExpired."""
        self._process.join(timeout_s)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    streams: tuple[Connection, Connection, Connection],
) -> None:
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives with the process
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())
