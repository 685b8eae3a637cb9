"""A process that a test steers by lines, and that answers in lines of JSON."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tests.support.preloaded import PreloadedProcess

ANSWER_S = 300.0
ENDED = object()


class SteeredProcess:
    """A process of ``python -m MODULE ARGUMENTS``.

    Args:
        name: in errors.
        forked: start fast, from a process with the imports; else as a program, so that its end is
            the interpreter's and it can use a GPU, which a fork of what has looked at the driver
            could not.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        forked: bool = True,
    ) -> None:
        self.name = name
        self.process: Any
        self._errors: list[str] = []
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        variables = {"OMP_NUM_THREADS": "1", **variables}
        reads = [self._read]
        if forked:  # its errors go where those of the tests go
            self.process = PreloadedProcess(module, list(arguments), variables)
            self._pipes = [self.process.stdin, self.process.stdout]
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._pipes = [self.process.stdin, self.process.stdout, self.process.stderr]
            reads.append(self._read_errors)
        self._readers = [threading.Thread(target=read, daemon=True) for read in reads]
        for reader in self._readers:
            reader.start()

    def tell(self, line: str) -> None:
        """Begin a command."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """The next answer, whatever it answers."""
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} did not answer within {timeout_s} s") from None
        if found is ENDED:
            raise AssertionError(f"{self.name} ended without an answer: {self._all_errors()}")
        return found

    def answers_so_far(self) -> list[Any]:
        """All answers that came since the last one taken; `ENDED` at the end of the process."""
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        return answers

    def finish(self) -> int:
        """No more commands; the exit code."""
        self.process.stdin.close()
        code: int = self.process.wait(ANSWER_S)
        return code

    def leave(self) -> tuple[int, str]:
        """End it in the ordinary way; returns exit code and stderr."""
        return self.finish(), self._all_errors()

    def end(self) -> None:
        """Kill it (a stopped process too) and close its pipes."""
        self.process.kill()
        self.process.wait(ANSWER_S)
        sys.stderr.write(self._all_errors())
        for pipe in self._pipes:
            # A command begun after its death is still in the buffer, and is flushed to nobody.
            with suppress(BrokenPipeError):
                pipe.close()

    def _all_errors(self) -> str:
        for reader in self._readers:
            reader.join(ANSWER_S)
        return "".join(self._errors)

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(ENDED)

    def _read_errors(self) -> None:
        self._errors.extend(self.process.stderr)
