"""What a run in a sandbox is given, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

MIB = 1 << 20
PYTHON = "python3"
"""As the first word of a command line: the sandbox's Python interpreter."""
NO_FILES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run.

    Attributes:
        wall_s: seconds until it is killed, with all that it started.
        cpu_s: CPU seconds of each process; ``None``: `wall_s`, rounded up, and one more.
        memory_bytes: memory of all processes together, and address space of each.
        tmp_bytes: size of ``/tmp`` and of ``/dev/shm``, and of the largest file.
        processes: processes and threads at once.
        open_files: descriptors of each process.
        output_bytes: standard output and error together.
    """

    wall_s: float = 10.0
    cpu_s: int | None = None
    memory_bytes: int = 1024 * MIB
    tmp_bytes: int = 64 * MIB
    processes: int = 64
    open_files: int = 64
    output_bytes: int = MIB

    @property
    def whole_cpu_s(self) -> int:
        """CPU seconds of each process."""
        return self.cpu_s or math.ceil(self.wall_s) + 1


class SandboxEnd(StrEnum):
    """How a run ended. All of these are the program's doing.

    FINISHED: it ended on its own, with whatever exit code. TIMED_OUT, OUT_OF_MEMORY,
    OUTPUT_TOO_LARGE: it was killed at that limit.
    """

    FINISHED = "finished"
    TIMED_OUT = "timed out"
    OUT_OF_MEMORY = "out of memory"
    OUTPUT_TOO_LARGE = "output too large"


@dataclass(frozen=True, slots=True)
class Result:
    """What a program did.

    Attributes:
        end: how it ended.
        exit_code: 128 and the signal's number if a signal ended it; ``None`` if it was killed at a
            limit.
        stdout: at most `Limits.output_bytes`.
        stderr: what is left of them.
    """

    end: SandboxEnd
    exit_code: int | None
    stdout: bytes
    stderr: bytes


class Sandbox(Protocol):
    """Runs programs apart from everything else."""

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, str] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Result:
        """Run a program in a folder of its own and wait for its end.

        Blocks; call it in a thread where a loop runs.

        Args:
            argv: command line; `PYTHON` as the first word is the sandbox's interpreter.
            files: contents by name; they lie in the folder in which the program starts.
            stdin: its standard input.
            limits: ``None``: those of the configuration.

        Raises:
            SandboxUnavailableError: the sandbox has failed, not the program.
        """
        ...
