"""Run a command line that contains a program: bounds on time, memory and output, and its end.

The command line is bubblewrap's, or the user's own wrapper's. Output is read as it comes and never
held beyond the limit.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sluice.concurrency.process import stat_fields
from sluice.errors import SandboxUnavailableError
from sluice.sandbox.run_result import NO_FILES, Limits, Result, SandboxEnd

END_TIMEOUT_S = 20.0
"""Seconds in which a killed sandbox has to be gone; a busy machine takes a while."""
START_TIMEOUT_S = 30.0
"""Seconds in which the wrapper has to say which process is the first of its namespace."""
READY = b"sluice: ready\n"
"""What the sandbox writes to standard error once its limits hold, just before the program."""
MARK_VARIABLES = ("SLUICE_SCORER_MARK",)
"""Variables by which the reward service finds what its processes started."""
_LOOK_S = 0.05
_TAKE_DOWN_S = 1.0
_CHUNK_BYTES = 1 << 16
_SHOWN_BYTES = 500
_PROC = Path("/proc")
_PARENT_FIELD = 1  # of `stat_fields`
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Containment:
    """A command line and what its process inherits.

    Attributes:
        argv: of the wrapper, with the program's.
        descriptors: files that it reads.
        first_process: descriptor on which it reports the first process of its namespace.
        announces_ready: whether it writes `READY`.
        user: the user and group that it runs as; ``None``: this process's.
        failure_code: exit code that means that the wrapper itself has failed.
        environment: its variables; marks by which this process's own are found are added.
    """

    argv: Sequence[str]
    descriptors: Sequence[int] = ()
    first_process: tuple[int, int] | None = None
    announces_ready: bool = False
    user: int | None = None
    failure_code: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Output:
    """What was read so far; `num_left` bytes may still come."""

    num_left: int
    chunks: dict[int, list[bytes]] = field(default_factory=dict)

    def take(self, stream: int, chunk: bytes) -> bool:
        """Keep a chunk; return whether it fits."""
        self.chunks.setdefault(stream, []).append(chunk[: self.num_left])
        has_space = len(chunk) <= self.num_left
        self.num_left -= min(len(chunk), self.num_left)
        return has_space

    def of(self, stream: int) -> bytes:
        return b"".join(self.chunks.get(stream, ()))


class ContainedProcess:
    """A running command line. Made by `contained_process`, which ends it."""

    def __init__(self, process: subprocess.Popen[bytes], containment: Containment) -> None:
        self.process, self._containment = process, containment
        self._ended = os.pidfd_open(process.pid)
        self._first_process: ProcessHandle | None = None

    def find_first(self) -> None:
        """Read which process is the first of its namespace; waits until the wrapper says it."""
        if self._containment.first_process is None or self._first_process is not None:
            return
        reader, _ = self._containment.first_process
        text = b""
        while select.select([reader], [], [], START_TIMEOUT_S)[0]:
            chunk = os.read(reader, 1024)
            if not chunk:
                break
            text += chunk
        with suppress(ValueError, KeyError, ProcessLookupError):
            self._first_process = ProcessHandle(json.loads(text)["child-pid"], self.process.pid)

    @property
    def ended_descriptor(self) -> int:
        """A descriptor that becomes readable when the wrapper ends."""
        return self._ended

    def end(self) -> None:
        """Kill all of it, and wait until nothing is left.

        Raises:
            SandboxUnavailableError: something is left (it hangs in the kernel).
        """
        is_gone = True
        if self._first_process is not None:
            is_gone = self._first_process.kill_and_wait(END_TIMEOUT_S)
        try:
            if self._first_process is None:
                # A wrapper may have to take its sandbox down.
                self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_TAKE_DOWN_S)  # it reaps the first process
            self._signal(signal.SIGKILL)
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            is_gone = False
        finally:
            os.close(self._ended)
            if self._first_process is not None:
                self._first_process.close()
        if not is_gone:
            raise SandboxUnavailableError(
                f"processes of the sandbox are left {END_TIMEOUT_S:g} s after SIGKILL; look for a "
                "file system or device that hangs"
            )

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the wrapper's session, while it is not reaped or has members."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _mark_variables() -> Mapping[str, str]:
    return {name: os.environ[name] for name in MARK_VARIABLES if name in os.environ}


@contextmanager
def contained_process(
    containment: Containment, *, merged: bool = False
) -> Iterator[ContainedProcess]:
    """Start the command line; nothing of it outlives the block.

    Args:
        merged: whether standard error goes to standard output.

    Raises:
        SandboxUnavailableError: it cannot be started.
    """
    user = containment.user
    try:
        process = subprocess.Popen(
            list(containment.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            bufsize=0,
            pass_fds=tuple(containment.descriptors),
            start_new_session=True,
            env={**_mark_variables(), **containment.environment},
            user=user,
            group=user,
            extra_groups=None if user is None else (),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailableError(
            f"{containment.argv[0]} cannot be started: {error}"
        ) from error
    finally:
        if containment.first_process is not None:
            os.close(containment.first_process[1])
    try:
        running = ContainedProcess(process, containment)
    except OSError as error:
        with process:
            os.killpg(process.pid, signal.SIGKILL)
        raise SandboxUnavailableError(
            f"{containment.argv[0]} cannot be watched, so it was ended: {error}"
        ) from error
    with ExitStack() as closing:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                closing.enter_context(stream)
        closing.callback(running.end)
        running.find_first()
        yield running


def run_contained(containment: Containment, stdin: bytes, limits: Limits) -> Result:
    """Run to the end, or to the first limit.

    Raises:
        SandboxUnavailableError: the wrapper has failed, not the program.
    """
    began_s = time.monotonic()
    with contained_process(containment) as running:
        output = _Output(limits.output_bytes + len(READY))
        end = _feed_and_read(running, output, stdin, limits, began_s)
        process = running.process
        if end is None:
            _drain(process, output)
        elif containment.announces_ready and not output.of(2) and process.stderr is not None:
            # The limit was reached before this stream had its turn.
            with suppress(BlockingIOError):
                program_stderr = os.read(process.stderr.fileno(), _SHOWN_BYTES)
                output.chunks[2] = [program_stderr[: program_stderr.find(READY) + len(READY)]]
        code = process.wait(END_TIMEOUT_S) if end is None else None
    stdout, stderr = output.of(1), output.of(2)
    # Threads of this process may log before the wrapper has taken its place: gRPC's do at a fork.
    _, ready, program_stderr = stderr.partition(READY)
    if containment.announces_ready and not ready:
        if end is SandboxEnd.TIMED_OUT:
            raise SandboxUnavailableError(f"it did not start within {limits.wall_s:g} s")
        raise SandboxUnavailableError(_reason(stderr, code))
    if code is not None and code == containment.failure_code:
        raise SandboxUnavailableError(_reason(stderr, code))
    if end is None:
        code = code if code is None or code >= 0 else 128 - code
        end = _end_of(code, limits, time.monotonic() - began_s)
    stderr = program_stderr if containment.announces_ready else stderr
    return Result(end, code if end is SandboxEnd.FINISHED else None, stdout, stderr)


class ProcessSandbox(ABC):
    """Runs programs as processes of this machine, which can be talked to as they run."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, str] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Result:
        """Run a program; see `Sandbox.run`."""
        limits = limits or self._limits
        with self.command(argv, files, limits) as containment:
            return run_contained(containment, stdin, limits)

    @abstractmethod
    def command(
        self, argv: Sequence[str], files: Mapping[str, str], limits: Limits
    ) -> AbstractContextManager[Containment]:
        """Give the command line of a program; what it needs is there during the block."""


def _end_of(code: int | None, limits: Limits, taken_s: float) -> SandboxEnd:
    """Return how a program ended that nobody here killed: the kernel may have, at its CPU limit."""
    killed = code in (128 + signal.SIGKILL, 128 + signal.SIGXCPU)
    if killed and taken_s * (os.cpu_count() or 1) >= limits.whole_cpu_s:
        return SandboxEnd.TIMED_OUT
    return SandboxEnd.FINISHED


def _reason(stderr: bytes, code: int | None) -> str:
    stderr_text = stderr[-_SHOWN_BYTES:].decode(errors="replace").strip()
    return f"it ended with exit code {code} before the program: {stderr_text or 'no message'}"


def _feed_and_read(
    running: ContainedProcess, output: _Output, stdin: bytes, limits: Limits, began_s: float
) -> SandboxEnd | None:
    """Feed and read the program until it ends or reaches a limit; ``None``: it ended."""
    process = running.process
    assert process.stdin is not None
    with selectors.DefaultSelector() as watched:
        for number, stream in ((1, process.stdout), (2, process.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            watched.register(stream, selectors.EVENT_READ, number)
        os.set_blocking(process.stdin.fileno(), False)
        watched.register(process.stdin, selectors.EVENT_WRITE, 0)
        watched.register(running.ended_descriptor, selectors.EVENT_READ, -1)
        unsent, looked_s = memoryview(stdin), began_s
        while True:
            now_s = time.monotonic()
            if now_s - began_s >= limits.wall_s:
                return SandboxEnd.TIMED_OUT
            if now_s - looked_s >= _LOOK_S:
                looked_s = now_s
                if holds_too_much(process.pid, limits.memory_bytes):
                    return SandboxEnd.OUT_OF_MEMORY
            for key, _ in watched.select(min(_LOOK_S, limits.wall_s - (now_s - began_s))):
                if key.data == -1:
                    return None
                if key.data == 0:
                    unsent = _feed(watched, process, unsent)
                elif not _read(watched, key, output):
                    return SandboxEnd.OUTPUT_TOO_LARGE


def holds_too_much(pid: int, memory_bytes: int) -> bool:
    """Return whether a process tree holds more than `memory_bytes`."""
    return resident_of(pid) > memory_bytes and memory_of(pid) > memory_bytes


def _feed(
    watched: selectors.BaseSelector, process: subprocess.Popen[bytes], unsent: memoryview
) -> memoryview:
    assert process.stdin is not None
    try:
        unsent = (
            unsent[os.write(process.stdin.fileno(), unsent[:_CHUNK_BYTES]) :] if unsent else unsent
        )
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        unsent = unsent[:0]
    if not unsent:
        watched.unregister(process.stdin)
        process.stdin.close()
    return unsent


def _read(watched: selectors.BaseSelector, key: selectors.SelectorKey, output: _Output) -> bool:
    chunk = os.read(key.fd, _CHUNK_BYTES)
    if not chunk:
        watched.unregister(key.fileobj)
        return True
    return output.take(key.data, chunk)


def _drain(process: subprocess.Popen[bytes], output: _Output) -> None:
    """Take what an ended program has left in its pipes."""
    for number, stream in ((1, process.stdout), (2, process.stderr)):
        assert stream is not None
        with suppress(BlockingIOError, ValueError):
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                if not output.take(number, chunk):
                    break


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it, as far as the kernel lists children."""
    yield pid
    for file in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            for child in file.read_text(encoding="ascii").split():
                yield from descendants(int(child))


def memory_of(pid: int) -> int:
    """Return the bytes that a process and its descendants hold; shared pages count once."""
    pids = list(descendants(pid))
    return sum(map(_proportional_bytes, pids))


def resident_of(pid: int) -> int:
    """Return the same, with shared pages counted for each process: quick, and never too little."""
    return sum(map(_resident_bytes, list(descendants(pid))))


def _resident_bytes(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except ProcessLookupError:
        return 0
    except OSError:
        return _resident_bytes(pid)
    sizes = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return int(sizes[0]) * 1024 if sizes else _resident_bytes(pid)


class ProcessHandle:
    """A child's child, by a descriptor that never means another process.

    Args:
        pid: of the process.
        parent: of its parent, which must not have been reaped yet.

    Raises:
        ProcessLookupError: the process has ended.
    """

    def __init__(self, pid: int, parent: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        fields = stat_fields(pid)
        # It ended, and the number may be another one's by now.
        if not fields or int(fields[_PARENT_FIELD]) != parent:
            self.close()
            raise ProcessLookupError(pid)

    def kill_and_wait(self, timeout_s: float) -> bool:
        """Kill it; return whether it ended in time.

        If it is the first process of a namespace, all others there have ended before it.
        """
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)
