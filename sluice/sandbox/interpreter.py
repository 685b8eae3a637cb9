"""A Python interpreter in a sandbox that keeps variables and files between calls."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.errors import SandboxUnavailableError
from sluice.sandbox import interpreter_loop
from sluice.sandbox.bubblewrap import with_remedy
from sluice.sandbox.contained import (
    READY,
    ContainedProcess,
    ProcessSandbox,
    contained_process,
    holds_too_much,
)
from sluice.sandbox.run_result import NO_FILES, PYTHON, Limits, SandboxEnd

_LOOK_S = 0.05
_CHUNK_BYTES = 1 << 16
_WHOLE_S = 3600  # of the process, which serves many calls
_STARTED = interpreter_loop.STARTED.encode()


@dataclass(frozen=True, slots=True)
class CodeOutput:
    """What code printed.

    Attributes:
        output: its standard output and error, at most the limit's bytes.
        end: ``None``: the interpreter still runs; else why it is gone, with variables and files.
            FINISHED: the code has ended it.
    """

    output: str
    end: SandboxEnd | None


class Interpreter:
    """A sandboxed Python process, started by the first call, and again after it was lost.

    Args:
        limits: its bounds; `wall_s` and `output_bytes` are those of a call.
    """

    def __init__(self, sandbox: ProcessSandbox, limits: Limits) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._open = ExitStack()
        self._running: ContainedProcess | None = None
        self._has_started = False

    def run(self, code: str) -> CodeOutput:
        """Execute code.

        Raises:
            SandboxUnavailableError: the sandbox failed, not the code.
        """
        try:
            return self._run_and_reply(code)
        except OSError as error:
            self.close()
            raise SandboxUnavailableError(f"the sandbox failed: {error}") from error

    def _run_and_reply(self, code: str) -> CodeOutput:
        if self._running is None:
            self._start()
        assert self._running is not None
        mark = secrets.token_hex(16)
        request = json.dumps({"code": code, "mark": mark}).encode() + b"\n"
        output, end = self._exchange(self._running, request, mark.encode())
        if not self._has_started:
            # What comes before is the wrapper's.
            stderr_text, started, output = output.partition(_STARTED)
            if not started:
                self.close()
                detail = stderr_text[-500:].decode(errors="replace").strip() or f"no message, {end}"
                raise with_remedy(SandboxUnavailableError(f"the sandbox did not start: {detail}"))
            self._has_started = True
        if end is not None:
            self.close()
        return CodeOutput(output.decode(errors="replace"), end)

    def close(self) -> None:
        """End the process, with all that it started."""
        self._running = None
        self._open.close()

    def _start(self) -> None:
        # The kernel ends the process when the thread that started it ends: it needs one of its own.
        thread = ThreadPoolExecutor(1, "interpreter")
        self._open.callback(thread.shutdown)
        source = Path(interpreter_loop.__file__).read_text(encoding="utf-8")
        limits = replace(self._limits, wall_s=_WHOLE_S, cpu_s=_WHOLE_S)
        command = self._sandbox.command([PYTHON, "-u", "-c", source], NO_FILES, limits)
        try:
            containment = self._open.enter_context(command)
            entering = thread.submit(
                self._open.enter_context, contained_process(containment, merged=True)
            )
            self._running = entering.result()
        except BaseException:
            self._open.close()
            raise
        self._has_started = False

    def _exchange(
        self, running: ContainedProcess, request: bytes, mark: bytes
    ) -> tuple[bytes, SandboxEnd | None]:
        """Send a request and read until its mark, or until the process is lost."""
        process, output, unsent = running.process, bytearray(), memoryview(request)
        assert process.stdin is not None
        assert process.stdout is not None
        max_bytes = self._limits.output_bytes + len(mark) + len(READY + _STARTED)
        ends_s = time.monotonic() + self._limits.wall_s
        with selectors.DefaultSelector() as watched:
            for stream, events in (
                (process.stdin, selectors.EVENT_WRITE),
                (process.stdout, selectors.EVENT_READ),
            ):
                os.set_blocking(stream.fileno(), False)
                watched.register(stream, events)
            while time.monotonic() < ends_s:
                for key, _ in watched.select(_LOOK_S):
                    if key.fileobj is process.stdin:
                        unsent = _write_part(process.stdin.fileno(), unsent)
                        if not unsent:
                            watched.unregister(process.stdin)
                        continue
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    if not chunk:
                        return bytes(output), SandboxEnd.FINISHED
                    searched = max(0, len(output) - len(mark))
                    output += chunk
                    if (end := output.find(mark, searched)) >= 0:
                        return bytes(output[:end]), None
                    if len(output) > max_bytes:
                        return bytes(output[:max_bytes]), SandboxEnd.OUTPUT_TOO_LARGE
                if holds_too_much(process.pid, self._limits.memory_bytes):
                    return bytes(output), SandboxEnd.OUT_OF_MEMORY
        return bytes(output), SandboxEnd.TIMED_OUT


def _write_part(descriptor: int, unsent: memoryview) -> memoryview:
    with suppress(BlockingIOError):
        try:
            return unsent[os.write(descriptor, unsent[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            return unsent[:0]
    return unsent
