"""Try the how-tos as they are written: their console and Python blocks, in a user's folder.

A block with the language ``console`` runs line by line (those after ``$ ``, joined at a trailing
backslash); one with ``python`` runs as a program; one with ``yaml`` or ``properties`` whose first
line is a comment ``# name`` is written to that file. Other blocks (``text``, ``bash`` for another
machine) are only read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.first_hour.shell import WAIT_S, Shell

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+)\n")


def tried_pages(folder: Path, shell: Shell) -> Mapping[str, str]:
    """Return, by page, the first block that failed with its output; empty text: all worked."""
    return {page.stem: _tried(page, shell) for page in sorted(folder.glob("*.md"))}


def _tried(page: Path, shell: Shell) -> str:
    for language, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        named = _FILE.match(body)
        if language in {"yaml", "properties", "python", "bash"} and named:
            (shell.folder / named[1]).write_text(body, encoding="utf-8")
        elif language == "python":
            found = _run([sys.executable, "-c", body], shell)
            if found:
                return found
        elif language == "console":
            for line in _typed(body):
                found = _run(["bash", "-ec", line], shell)
                if found:
                    return f"$ {line}\n{found}"
    return ""


def _typed(body: str) -> Iterator[str]:
    text = body.replace("\\\n", "")
    yield from (line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))


def _run(command: list[str], shell: Shell) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        cwd=shell.folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return "" if ended.returncode == 0 else ended.stdout[-2000:] or f"exit code {ended.returncode}"
