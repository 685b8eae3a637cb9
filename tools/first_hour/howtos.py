"""Try the how-tos as they are written: their console and Python blocks, in a user's folder.

A block with the language ``console`` runs line by line (those after ``$ ``, joined at a trailing
backslash); ``# exit code N`` at the end of a line is what it has to end with. A block whose first
line is a comment ``# name`` or ``// name`` is written to that file; any other one with ``python``
runs as a program. Other blocks (``text``, ``bash`` for another machine) are only read. ``pip
install`` goes to a folder of the trial, and ``$PROTO`` is the checkout's. Runs that a page leaves
active are stopped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tools.commands import end
from tools.phases import say

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:#|//) ([\w-]+\.\w+)\b.*\n")
_WRITTEN = {"yaml", "properties", "python", "bash", "javascript"}
_EXIT_CODE = re.compile(r"# exit code (\d+)$")
_WITHIN_S, _END_S, _LATE = 300.0, 60.0, 124


def tried_pages(folder: Path, user: Path, names: Collection[str] | None) -> Mapping[str, str]:
    """Return, by page, the first block that failed with its output; empty text: all worked.

    Args:
        folder: of the pages.
        user: folder of the user; `runs/mine` has ended there.
        names: the pages to try; none: all.
    """
    found = {}
    for page in sorted(folder.glob("*.md")):
        if names and page.stem not in names:
            continue
        say(f"  {page.stem}")
        found[page.stem] = _tried(page, user)
        for active in user.glob("runs/*/endpoints.json"):
            stop = ("stop", "--now", str(active.parent))
            typed_command([sys.executable, "-m", "sluice", *stop], user)
    return found


def typed_command(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command to its end in a folder; return exit code and all output.

    One that takes too long is ended, and has the exit code of `timeout`. What a command leaves in
    the background stays, such as a run for the next commands.
    """
    late = ""
    with tempfile.TemporaryFile(prefix="first-hour-") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(_WITHIN_S)
        except subprocess.TimeoutExpired:
            end(process, _END_S)
            code, late = _LATE, f"\nno end within {_WITHIN_S:g} s"
        output.seek(0)
        return code, output.read().decode("utf-8", "replace") + late


def _tried(page: Path, user: Path) -> str:
    for language, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        named = _FILE.match(body)
        if language in _WRITTEN and named:
            (user / named[1]).write_text(body, encoding="utf-8")
        elif language == "python":
            if found := _failure([sys.executable, "-c", body], user):
                return f"{body}\n{found}"
        elif language == "console":
            for line in _typed(body):
                expected = _EXIT_CODE.search(line)
                code = int(expected[1]) if expected else 0
                if found := _failure(["bash", "-ec", line], user, code):
                    return f"$ {line}\n{found}"
    return ""


def _typed(body: str) -> Iterator[str]:
    text = body.replace("\\\n", "")
    yield from (line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))


def _failure(command: list[str], user: Path, code: int = 0) -> str:
    """Return the output of a command that ends otherwise than with `code`; empty: it did so."""
    packages = str(user / "packages")
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_TARGET": packages,
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PYTHONPATH": packages,
        "MPLBACKEND": "agg",
        "PROTO": str(ROOT / "proto"),
    }
    ended, output = typed_command(command, user, environment)
    return "" if ended == code else f"{output[-2000:]}\nexit code {ended}"
