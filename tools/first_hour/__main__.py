"""Repeat a new user's first hour, and print what is still wrong: `make first-hour`.

The last line printed is one JSON object: `defects_left` (numbered ones that are left, 0 to 16),
`longest_silence_s` (of any run with its output in a file), `seconds_to_first_line`,
`commands_without_json`, `howtos_tried`, `wheel_ok`, `phases` and `problems`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer

from sluice.cli.main import commands
from tools.commands import CommandError, output_of
from tools.first_hour.howtos import tried_pages
from tools.first_hour.shell import Shell
from tools.first_hour.trial import GROUPED, SINGLE
from tools.first_hour.world import build
from tools.phases import PhaseError, Phases, conclude, say, tool_parser

ROOT = Path(__file__).resolve().parents[2]
_PIP_S = 900.0


def main() -> int:
    """Run the trial."""
    parser = tool_parser(__doc__, "python -m tools.first_hour --no-wheel")
    parser.add_argument("--wheel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of single checks")
    parser.add_argument(
        "--howto", nargs="*", help="only these how-tos, after a short run; none: all"
    )
    arguments = parser.parse_args()
    phases, left = Phases(), dict[int, list[str]]()
    only = arguments.only
    single = [one for one in SINGLE if only is None or one[0] in only]
    groups = GROUPED if only is None else ()
    pages: Mapping[str, str] = {}
    if arguments.howto is not None:
        single, groups = [], GROUPED[:1]  # which leaves a finished run in runs/mine
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        shell = Shell(Path(name))
        build(shell.folder)
        for number, what, check in single:
            with phases.phase(f"defect {number}, {what}"):
                left.setdefault(number, []).extend(_found(partial(check, shell)))
        for group in groups:
            with phases.phase(group.__name__.replace("_", " ")):
                try:
                    left |= group(shell)
                except (PhaseError, OSError, ValueError, KeyError) as error:
                    left.setdefault(0, []).append(f"{group.__name__}: {error}")
        if only is None:
            with phases.phase("how-tos"):
                pages = tried_pages(ROOT / "docs" / "how-to", shell, arguments.howto)
        wheel = _found(partial(_wheel, Path(name))) if arguments.wheel else ["not tried"]
    problems = [f"defect {number}: {text}" for number, found in left.items() for text in found]
    problems += [f"how-to {page}: {text}" for page, text in pages.items() if text]
    problems += [f"wheel: {text}" for text in wheel if arguments.wheel]
    without_json = sorted(_without_json())
    report = {
        "defects_left": sum(1 for found in left.values() if found),
        "longest_silence_s": round(shell.longest_silence_s, 1),
        "seconds_to_first_line": round(max(shell.first_line_s, default=0.0), 1),
        "commands_without_json": len(without_json),
        "howtos_tried": sum(1 for text in pages.values() if not text),
        "wheel_ok": not wheel,
        "phases": phases.seconds,
        "without_json": without_json,
    }
    return conclude(report, problems)


def _found(check: Callable[[], list[str]]) -> list[str]:
    try:
        found = check()
    except (PhaseError, CommandError, OSError, ValueError, KeyError) as error:
        found = [str(error)]
    for text in found:
        say(f"  left: {text}")
    return found


def _wheel(folder: Path) -> list[str]:
    """Install the wheel into an empty environment, and use it outside of the checkout."""
    pip = (str(folder / "venv" / "bin" / "python"), "-m", "pip", "--quiet")
    output_of(sys.executable, "-m", "venv", str(folder / "venv"), timeout_s=_PIP_S)
    output_of(*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT), timeout_s=_PIP_S)
    (wheel,) = folder.glob("sluice-*.whl")
    constraints = str(ROOT / "constraints.txt")
    output_of(*pip, "install", "-c", constraints, str(wheel), timeout_s=_PIP_S)
    sluice = str(folder / "venv" / "bin" / "sluice")
    output_of(sluice, "config", "explain", "data.train_batch_size", timeout_s=60.0, folder=folder)
    shown = output_of(sluice, "--version", "-v", timeout_s=60.0, folder=folder)
    return [] if shown.startswith("sluice ") else [shown]


def _without_json() -> Iterator[str]:
    """Yield commands that have no --json."""

    def walk(command: Any, name: str) -> Iterator[str]:  # noqa: ANN401 - typer has its own click
        children = getattr(command, "commands", None)
        if children is not None:
            for child, found in children.items():
                yield from walk(found, f"{name} {child}".strip())
        elif not any("--json" in parameter.opts for parameter in command.params):
            yield name

    yield from walk(typer.main.get_command(commands), "")


if __name__ == "__main__":
    sys.exit(main())
