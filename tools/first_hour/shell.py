"""Commands as a user types them, with their output in a file that is watched for silence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.commands import started
from tools.phases import PhaseError, until

SLUICE = (sys.executable, "-m", "sluice")
WAIT_S = 300.0
_LOOK_S = 0.05


@dataclass
class Shell:
    """Runs commands in the user's folder.

    Attributes:
        longest_silence_s: longest time without a line of any run that `running` watched.
        first_line_s: seconds to the first line of each.
    """

    folder: Path
    longest_silence_s: float = 0.0
    first_line_s: list[float] = field(default_factory=list)

    def run(self, *words: str) -> tuple[int, str]:
        """Run `sluice` to its end; return exit code and all output."""
        return self.type((*SLUICE, *words))

    def type(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command to its end; return exit code and all output."""
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        return ended.returncode, ended.stdout

    @contextmanager
    def running(self, log_name: str, *words: str) -> Iterator[Running]:
        """Run `sluice` in the background, its output in a file, as with nohup."""
        log, flushes = self.folder / log_name, {"PYTHONUNBUFFERED": "1"}
        command = (*SLUICE, *words)
        with started(command, log, flushes, folder=self.folder, ends_within_s=WAIT_S) as process:
            run = Running(process, log)
            try:
                yield run
            finally:
                if run.first_line_s is not None:
                    self.first_line_s.append(run.first_line_s)
                self.longest_silence_s = max(self.longest_silence_s, run.longest_silence_s)


class Running:
    """A command in the background."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.first_line_s: float | None = None
        self.longest_silence_s = 0.0
        self._began_s = self._grew_s = time.monotonic()
        self._size = 0

    @property
    def text(self) -> str:
        """The output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def look(self) -> str:
        """Measure the silence, and return the output so far."""
        now_s, size = time.monotonic(), self.log.stat().st_size
        if self.process.poll() is None or size > self._size:
            self.longest_silence_s = max(self.longest_silence_s, now_s - self._grew_s)
        if size > self._size:
            self.first_line_s = self.first_line_s or now_s - self._began_s
            self._size, self._grew_s = size, now_s
        return self.text

    def until(self, pattern: str) -> None:
        """Wait for a line.

        Raises:
            PhaseError: the command ended first, or it did not come in time.
        """

        def found() -> bool:
            text = self.look()
            if re.search(pattern, text, re.MULTILINE):
                return True
            if self.process.poll() is not None:
                raise PhaseError(f"{self.log.name}: ended without {pattern!r}:\n{text[-2000:]}")
            return False

        until(f"{self.log.name}: {pattern}", found, timeout_s=WAIT_S, interval_s=_LOOK_S)

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        """Send signals; wait for the end; return exit code and output."""
        for number in signals:
            self.process.send_signal(number)

        def ended() -> bool:
            self.look()
            return self.process.poll() is not None

        until(f"{self.log.name}: its end", ended, timeout_s=WAIT_S, interval_s=_LOOK_S)
        return int(self.process.returncode), self.text


def has(text: str, *parts: str) -> list[str]:
    """Return what is missing in a text."""
    flat = " ".join(text.split())
    return [part for part in parts if not re.search(part, flat)]


def settings(**values: object) -> Sequence[str]:
    """Return ``key=value`` words; a double underscore is a dot."""
    return tuple(f"{key.replace('__', '.')}={value}" for key, value in values.items())
