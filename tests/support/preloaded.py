"""Processes that start from one that has imported their module already, in milliseconds."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.launch.processes.child import Child, LocalChild, ThisMachine, piped_output
from sluice.launch.service_spec import ServiceSpec

_CONTEXT = multiprocessing.get_context("forkserver")
# Torch, transformers and the services, once for each process of pytest.
_CONTEXT.set_forkserver_preload(
    [
        *("tests.support.rank_peer", "tests.support.replica_process", "tests.support.causal_lms"),
        *("services.trainer.__main__", "services.trainer.leader", "services.rollout.__main__"),
        *("services.reward.__main__", "services.evaluation.__main__", "tests.support.weight_peer"),
        "tests.support.late_imports",
    ]
)
# By what follows `python -m`, the module of their `main`.
_SERVICES = {
    f"services.{name}": f"services.{name}.__main__"
    for name in ("trainer", "rollout", "reward", "evaluation")
} | {"tests.support.gated_replica": "tests.support.gated_replica"}
_END_S = 600.0


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
        assert self._process.pid is not None
        self.pid = self._process.pid
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
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it and wait for its end; close the pipes."""
        self.kill()
        self.wait(_END_S)
        for pipe in (self.stdin, self.stdout):
            pipe.close()


def _run(
    module: str, arguments: list[str], environment: dict[str, str], streams: Sequence[Connection]
) -> None:
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives with the process
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


class PreloadedHost(ThisMachine):
    """Starts services as forks of a process that has their imports; others as usual.

    They are the services' own `main`, with the arguments, environment, output, signals and exit
    codes of a supervised process. The start of a trainer or a replica saves 5 s of a core.
    """

    async def start(self, spec: ServiceSpec) -> Child:
        """Start it at once."""
        python, _, module, *arguments = spec.command
        if python != sys.executable or module not in _SERVICES:
            return await super().start(spec)
        process, output, pipe = await fork_service(module, arguments, spec.environment)
        return LocalChild(spec.name, process, output, pipe)


async def fork_service(
    module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[ForkedService, asyncio.StreamReader, asyncio.BaseTransport]:
    """Start a service's `main` in a fork; return it, its output, and what closes that.

    Args:
        module: such as services.reward.
        arguments: of its command line.
        environment: on top of this process's.
    """
    await asyncio.to_thread(_import_all)
    output, pipe, write_end = await piped_output()
    its_output = Connection(write_end, readable=False)
    variables = {**os.environ, **environment}
    process = _CONTEXT.Process(
        target=_serve, args=(module, list(arguments), variables, its_output), daemon=True
    )
    process.start()
    its_output.close()
    return ForkedService(process), output, pipe


class ForkedService:
    """A child of the process that has the imports, with what asyncio's processes have."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._note_end)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode if self._ended.is_set() else None

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _import_all() -> None:
    """Wait until the process is there from which the others start."""
    first = _CONTEXT.Process(target=os.getpid, daemon=True)
    first.start()
    first.join()


def _serve(
    module: str, arguments: list[str], environment: dict[str, str], output: Connection
) -> None:
    os.setsid()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    supervised = environment | {SUPERVISOR_VARIABLE: str(os.getppid())}
    nothing = Connection(os.open(os.devnull, os.O_RDONLY), writable=False)
    errors = Connection(os.dup(output.fileno()), readable=False)
    _run(_SERVICES[module], arguments, supervised, (nothing, output, errors))
