"""Starts, steers and always ends the processes of `tests.support.weight_peer`."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from sluice.types import TransferGroupSpec
from tests.support.preloaded import PreloadedProcess

_ROOT = Path(__file__).parents[2]
_MODULE = "tests.support.weight_peer"
_ANSWER_S = 90.0


class PeerProcess:
    """One receiver in a process of its own.

    Args:
        name: of the member.
        forked: start fast, from a process with the imports; else as a program, so that its end is
            the interpreter's.
    """

    def __init__(self, name: str, *, forked: bool = True) -> None:
        self.name = name
        self._errors: list[str] = []
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        variables = {"OMP_NUM_THREADS": "1"}
        self._process: PreloadedProcess | subprocess.Popen[str]
        if forked:
            self._process = PreloadedProcess(_MODULE, [], variables)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                cwd=_ROOT,
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def join(self, spec: TransferGroupSpec) -> None:
        """Begin to join; the answer comes when the group is formed."""
        self.send("join", spec=msgspec.to_builtins(spec))

    def stage(self, version: int, *, keep: int = 0, **fault: float) -> None:
        """Begin to receive; `fault` is ``bucket`` and what goes wrong there."""
        self.send("stage", version=version, keep=keep, **fault)

    def held(self) -> dict[str, Any]:
        """What it holds as serving; nothing else may be under way."""
        self.send("held")
        return self.answer()

    def abort(self, reason: str) -> None:
        """Leave the epoch."""
        self.send("abort", reason=reason)

    def send(self, op: str, **arguments: Any) -> None:
        """Begin any command of `tests.support.weight_peer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def answer(self) -> dict[str, Any]:
        """The next answer, whatever it answers."""
        try:
            answer = self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"{self.name} did not answer within {_ANSWER_S} s") from None
        if answer is None:
            self._readers[1].join(_ANSWER_S)
            raise AssertionError(f"{self.name} ended: {''.join(self._errors)}")
        return answer

    def answers_so_far(self) -> list[dict[str, Any] | None]:
        """All answers that came since the last one taken; ``None`` at the end of the process."""
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def leave(self) -> tuple[int, str]:
        """End it in the ordinary way; returns exit code and stderr."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(_ANSWER_S)
        self._readers[1].join(_ANSWER_S)
        return code, "".join(self._errors)

    def end(self) -> None:
        """Kill it (a stopped process too) and close its pipes."""
        self._process.kill()
        self._process.wait(_ANSWER_S)
        for reader in self._readers:
            reader.join(_ANSWER_S)
        for pipe in filter(None, (self._process.stdin, self._process.stdout, self._errors_pipe)):
            # A command begun after its death is still in the buffer, and is flushed to nobody.
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    @property
    def _errors_pipe(self) -> IO[str] | None:
        """None for a fork, whose errors go where those of the tests go."""
        return None if isinstance(self._process, PreloadedProcess) else self._process.stderr

    def _read_errors(self) -> None:
        self._errors.extend(self._errors_pipe or ())


@contextmanager
def peer_processes(names: Sequence[str], *, forked: bool = True) -> Iterator[list[PeerProcess]]:
    """Start a process for each name, wait until they listen; all are gone when the block ends."""
    peers: list[PeerProcess] = []
    try:
        peers.extend(PeerProcess(name, forked=forked) for name in names)
        for peer in peers:
            # Importing torch takes seconds, which no deadline of a group is meant to cover.
            assert peer.answer() == {"op": "ready"}
        yield peers
    finally:
        for peer in peers:
            peer.end()
