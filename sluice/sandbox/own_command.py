"""The user's own sandbox: a command that contains a program, such as gVisor or nsjail."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sluice.errors import SandboxUnavailableError
from sluice.sandbox.contained import Containment, ProcessSandbox
from sluice.sandbox.run_result import MIB, PYTHON, Limits

FAILURE_CODE = 125
"""Exit code of the command if it has failed itself, as Docker's."""
_INHERITED = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "DOCKER_HOST")


class CommandSandbox(ProcessSandbox):
    """Runs programs through a command, which has to contain them.

    The time limit and that of the output hold here; for the others the command's words may hold
    ``{wall_s}``, ``{cpu_s}``, ``{memory_mb}``, ``{tmp_mb}``, ``{processes}`` and ``{open_files}``.
    ``{folder}`` is a folder of this machine with the program's files, which the command has to
    make the program's working folder. The program's command line follows as further words. At a
    limit the command gets SIGTERM, and a second later SIGKILL, with its session.

    Args:
        command: program and arguments.
        limits: of runs that name none.
        python: interpreter inside; ``None``: ``python3``.

    Raises:
        SandboxUnavailableError: the command is not there.
    """

    def __init__(self, command: Sequence[str], limits: Limits, python: str | None = None) -> None:
        if not command or shutil.which(command[0]) is None:
            shown = command[0] if command else "[]"
            raise SandboxUnavailableError(
                f"sluice.sandbox.command: {shown} cannot be run; give the path of your sandbox's "
                "program and its arguments"
            )
        super().__init__(limits)
        self._command, self._python = list(command), python or PYTHON

    @contextmanager
    def command(
        self, argv: Sequence[str], files: Mapping[str, str], limits: Limits
    ) -> Iterator[Containment]:
        """Give the command line of a program; its folder is there for the length of the block."""
        with tempfile.TemporaryDirectory(prefix="sluice-sandbox-") as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
            values = {
                "folder": folder,
                "wall_s": f"{limits.wall_s:g}",
                "cpu_s": str(limits.whole_cpu_s),
                "memory_mb": str(limits.memory_bytes // MIB),
                "tmp_mb": str(limits.tmp_bytes // MIB),
                "processes": str(limits.processes),
                "open_files": str(limits.open_files),
            }
            inside = [self._python if argv[0] == PYTHON else argv[0], *argv[1:]]
            yield Containment(
                [*(_filled(word, values) for word in self._command), *inside],
                failure_code=FAILURE_CODE,
                environment={name: os.environ[name] for name in _INHERITED if name in os.environ},
            )


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
