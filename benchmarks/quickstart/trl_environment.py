"""Make the virtual environment of the TRL baseline, apart from the project's own.

    python -m benchmarks.quickstart.trl_environment DIR

Installs `trl_requirements.txt`. A directory that already holds exactly these is left as it is.
Packages come from pip's configured sources or the wheels in `wheelhouse/`; a CPU build of torch in
either is preferred to the default one.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reporting import ROOT, print_line

REQUIREMENTS = Path(__file__).with_name("trl_requirements.txt")
WHEELHOUSE = ROOT / "wheelhouse"
STAMP = "requirements.sha256"


class EnvironmentFailedError(Exception):
    """The environment could not be made; names the step and the remedy."""


def interpreter_of(directory: Path) -> Path:
    """Return the Python of the environment in `directory`."""
    return directory / "bin" / "python"


def is_complete(directory: Path, requirements: Path = REQUIREMENTS) -> bool:
    """Return whether `directory` holds an environment with exactly these requirements."""
    stamp = directory / STAMP
    return (
        interpreter_of(directory).exists()
        and stamp.is_file()
        and stamp.read_text() == _digest(requirements)
    )


def make_environment(directory: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Create or renew the environment and return its Python.

    Raises:
        EnvironmentFailedError: Python has no venv module, or a package cannot be installed.
    """
    python = interpreter_of(directory)
    if is_complete(directory, requirements):
        print_line(f"{directory}: complete, nothing to do")
        return python
    if not python.exists():
        print_line(f"{directory}: creating a virtual environment")
        if _run([sys.executable, "-m", "venv", str(directory)]) != 0:
            raise EnvironmentFailedError(
                f"python -m venv {directory} failed; on Debian: apt-get install python3-venv"
            )
    _install(python, requirements)
    (directory / STAMP).write_text(_digest(requirements))
    print_line(f"{directory}: complete")
    return python


def _install(python: Path, requirements: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
    if WHEELHOUSE.is_dir():
        command += ["--find-links", str(WHEELHOUSE)]
    print_line(
        f"installing {requirements.name} from pip's configured sources (about 1.5 GB on disk with "
        "the CPU build of torch)"
    )
    if _run(command) != 0:
        raise EnvironmentFailedError(
            f"{requirements}: pip could not install it (its output is above); the packages must be "
            f"in pip's configured sources, or their wheels in {WHEELHOUSE}"
        )


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False).returncode


def _digest(requirements: Path) -> str:
    return hashlib.sha256(requirements.read_bytes()).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Make the environment; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("directory", type=Path)
    try:
        make_environment(parser.parse_args(arguments).directory)
    except EnvironmentFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
