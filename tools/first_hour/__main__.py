"""Try the how-tos as a new user types them, and the wheel: `make first-hour`.

The last line printed is one JSON object: `howtos_tried`, `wheel_ok`, `phases` and `problems`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tools.commands import CommandError, output_of
from tools.first_hour.howtos import tried_pages, typed_command
from tools.first_hour.world import build
from tools.phases import Phases, conclude, tool_parser

ROOT = Path(__file__).resolve().parents[2]
_PIP_S = 900.0
_STEPS = 7  # of the run whose folder the how-tos read


def main() -> int:
    """Run the trial."""
    parser = tool_parser(__doc__, "python -m tools.first_hour --no-wheel")
    parser.add_argument("--wheel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--howto", nargs="*", help="only these how-tos; none: all")
    arguments = parser.parse_args()
    phases = Phases()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        user = Path(name) / "user"
        user.mkdir()
        build(user)
        with phases.phase("a run"):
            steps = f"trainer.total_training_steps={_STEPS}"
            code, output = typed_command(
                [sys.executable, "-m", "sluice", "up", "run.yaml", steps], user
            )
        problems = [f"the run ended with code {code}:\n{output[-2000:]}"] if code else []
        with phases.phase("how-tos"):
            pages = tried_pages(ROOT / "docs" / "how-to", user, arguments.howto)
        problems += [f"how-to {page}: {text}" for page, text in pages.items() if text]
        is_wheel_ok = False
        if arguments.wheel:
            with phases.phase("wheel"):
                try:
                    _try_wheel(Path(name))
                    is_wheel_ok = True
                except CommandError as error:
                    problems.append(f"wheel: {error}")
    report = {
        "howtos_tried": sum(not text for text in pages.values()),
        "wheel_ok": is_wheel_ok,
        "phases": phases.seconds,
    }
    return conclude(report, problems)


def _try_wheel(folder: Path) -> None:
    """Install the wheel into an empty environment, and use it outside of the checkout.

    Raises:
        CommandError: a command failed.
    """
    pip = (str(folder / "venv" / "bin" / "python"), "-m", "pip", "--quiet")
    output_of(sys.executable, "-m", "venv", str(folder / "venv"), timeout_s=_PIP_S)
    output_of(*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT), timeout_s=_PIP_S)
    (wheel,) = folder.glob("sluice-*.whl")
    constraints = str(ROOT / "constraints.txt")
    output_of(*pip, "install", "-c", constraints, str(wheel), timeout_s=_PIP_S)
    sluice = str(folder / "venv" / "bin" / "sluice")
    output_of(sluice, "config", "explain", "data.train_batch_size", timeout_s=60.0, folder=folder)
    output_of(sluice, "--version", "-v", timeout_s=60.0, folder=folder)


if __name__ == "__main__":
    sys.exit(main())
