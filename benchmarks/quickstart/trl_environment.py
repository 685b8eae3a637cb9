"""The virtual environment of the TRL baseline, apart from the project's own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from benchmarks.reporting import ROOT, print_line

_REQUIREMENTS = Path(__file__).with_name("trl_requirements.txt")
_WHEELHOUSE = ROOT / "wheelhouse"


def trl_python(directory: Path) -> Path:
    """Make the environment, unless it holds exactly the requirements, and return its Python.

    Packages come from pip's configured sources or the wheels in `wheelhouse/`; pip prefers a CPU
    build of torch in either to the default one.

    Raises:
        SystemExit: the environment cannot be made.
    """
    python, stamp = directory / "bin" / "python", directory / "requirements.sha256"
    digest = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()
    if python.exists() and stamp.is_file() and stamp.read_text(encoding="ascii") == digest:
        return python
    if not python.exists():
        print_line(f"{directory}: creating a virtual environment")
        if subprocess.run([sys.executable, "-m", "venv", str(directory)], check=False).returncode:
            raise SystemExit("python -m venv failed; on Debian: apt-get install python3-venv")
    print_line(f"{directory}: installing {_REQUIREMENTS.name} (about 1.5 GB with a CPU torch)")
    links = ["--find-links", str(_WHEELHOUSE)] if _WHEELHOUSE.is_dir() else []
    command = [str(python), "-m", "pip", "install", "--quiet", "-r", str(_REQUIREMENTS), *links]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            f"{_REQUIREMENTS}: pip could not install it (its output is above); the packages must "
            f"be in pip's configured sources, or their wheels in {_WHEELHOUSE}"
        )
    stamp.write_text(digest, encoding="ascii")
    return python
