"""Start services as forks of one process that has their imports.

Of the 3.2 s until a replica of a small model listens, importing torch and transformers takes 3.1 s
of CPU time (measured 2026-11-27). A fork of `template` begins after that, at the start of a run and
after each death, and shares its memory.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.concurrency.waits import deadline
from sluice.errors import DeadlineError
from sluice.launch.processes.child import Child, LocalChild, ThisMachine, piped_output
from sluice.launch.processes.template import MESSAGE_BYTES, SPACE
from sluice.launch.service_spec import ServiceSpec

logger = logging.getLogger(__name__)

# A busy machine takes long to import torch.
_FORKED_WITHIN_S = 120.0
_THREADS = "OMP_NUM_THREADS"


class Fork:
    """A fork of a template, as `asyncio.subprocess.Process` shows a process."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = descriptor
        self._ended = asyncio.Event()

    def note_end(self, code: int) -> None:
        """Take the exit code."""
        self.returncode = code
        self._ended.set()
        os.close(self._descriptor)

    def note_orphaned(self) -> None:
        """Take its end as the kernel's kill: its parent, which knew its exit code, is gone."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.remove_reader(self._descriptor)
            self.note_end(-signal.SIGKILL)

        loop.add_reader(self._descriptor, end)

    async def wait(self) -> int:
        """Return the exit code."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


class Template:
    """The process that forks.

    Args:
        modules: what it imports before the first fork.
        environment: its variables; libraries read some of them when they are imported.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._control, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = "sluice.launch.processes.template"
        with its_end:
            self._process = subprocess.Popen(
                (sys.executable, "-m", name, str(its_end.fileno()), *modules, SPACE),
                env={**environment, "PYTHONUNBUFFERED": "1", SUPERVISOR_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                pass_fds=(its_end.fileno(),),
                start_new_session=True,  # Ctrl-C reaches its parent only
            )
        self._control.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._control, self._read)
        self._asked: deque[asyncio.Future[Fork]] = deque()
        self._forks: dict[int, Fork] = {}
        self.is_gone = False
        # It has left a request without an answer, and has not answered since.
        self._is_stuck = False

    async def fork(self, spec: ServiceSpec, environment: Mapping[str, str], output: int) -> Fork:
        """Fork a service.

        Args:
            spec: what to run: a Python module with arguments.
            environment: all of its variables.
            output: a descriptor for what it prints.

        Raises:
            OSError: the template is gone or did not answer before, or no process or descriptor is
                free.
            DeadlineError: it does not answer.
        """
        if self._is_stuck:  # its forks live: it is not ended
            raise OSError("the template does not answer")
        request = {"command": spec.command[2:], "environment": dict(environment)}
        forked: asyncio.Future[Fork] = self._loop.create_future()
        socket.send_fds(self._control, [json.dumps(request).encode()], [output])
        self._asked.append(forked)
        phase = f"forking {spec.name}"
        try:
            async with deadline(_FORKED_WITHIN_S, peer="the template", phase=phase):
                return await forked
        except DeadlineError:
            self._is_stuck = True
            raise

    def close(self) -> None:
        """End it, and with it what it has forked."""
        if not self.is_gone:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._process.kill()
            self._process.wait()
        self.is_gone = True
        for forked in self._asked:
            if not forked.done():
                forked.set_exception(OSError("the template has ended"))
        for fork in self._forks.values():
            fork.note_orphaned()
        self._forks.clear()

    def _read(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(
                self._control, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            logger.warning("the process that starts services has ended, and they with it")
            self.close()
            return
        self._is_stuck = False
        answer = json.loads(message)
        if "code" in answer:
            if (fork_of_end := self._forks.pop(answer["pid"], None)) is not None:
                fork_of_end.note_end(answer["code"])
            return
        forked = self._asked.popleft()
        if not descriptors:
            code = answer.get("failed", errno.EMFILE)
            if "pid" in answer:  # no descriptor is free here to watch it with
                with suppress(ProcessLookupError):
                    os.kill(answer["pid"], signal.SIGKILL)
            if not forked.done():
                forked.set_exception(OSError(code, f"the template: {os.strerror(code)}"))
            return
        fork = self._forks[answer["pid"]] = Fork(answer["pid"], descriptors[0])
        if forked.done():  # who asked has given up
            fork.send_signal(signal.SIGKILL)
        else:
            forked.set_result(fork)


class ForkingMachine(ThisMachine):
    """Starts some services on this machine as forks of a template, others as usual.

    A fork is the service's own program with the arguments, variables, output, signals and exit
    codes of a started process. Where the template fails, processes start without it. Only for
    processes that use no device: libraries read a device's variables when they are imported.

    Args:
        services: which are forked, as in ``python -m MODULE``.
        imports: what the template imports.
        threads: the number of threads that torch computes with, which it also reads then; a service
            with another number starts as usual.
    """

    def __init__(self, services: Sequence[str], imports: Sequence[str], threads: int) -> None:
        self._services, self._imports = tuple(services), tuple(imports)
        self._threads = str(threads)
        self._template: Template | None = None
        self._started: set[str] = set()

    async def start(self, spec: ServiceSpec) -> Child:
        """Start it at once; the first fork waits for the imports."""
        self._started.add(spec.name)
        program, kind, module, *_ = (*spec.command, "", "")
        is_forked = (program, kind) == (sys.executable, "-m") and module in self._services
        if not is_forked or spec.environment.get(_THREADS) != self._threads:
            return await super().start(spec)
        environment = {**os.environ, **spec.environment}
        output, pipe, write_end = await piped_output()
        try:
            if self._template is None or self._template.is_gone:
                its_own = {**os.environ, _THREADS: self._threads}
                self._template = Template(self._imports, its_own)
            fork = await self._template.fork(spec, environment, write_end)
            return LocalChild(spec.name, fork, output, pipe)
        except (OSError, DeadlineError) as error:
            logger.warning("%s starts without a template: %s", spec.name, error)
        except asyncio.CancelledError:
            pipe.close()
            raise
        finally:
            os.close(write_end)
        pipe.close()
        return await super().start(spec)

    def release(self, name: str) -> None:
        """Free what a process had; with the last one the template ends."""
        self._started.discard(name)
        if not self._started and self._template is not None:
            self._template.close()
            self._template = None
