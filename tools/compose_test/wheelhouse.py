"""torch's CPU build for the image, from where `make` takes it on this machine."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_PIN = re.compile(r"^torch==(\S+)$", re.MULTILINE)


def cpu_torch(root: Path) -> str:
    """Put the wheel of a CPU build into `wheelhouse/`, if pip's own find-links hold one.

    Returns:
        what the image will take.
    """
    pin = _PIN.search((root / "constraints.txt").read_text(encoding="utf-8"))
    pattern = f"torch-{pin[1]}+cpu-*.whl" if pin else "torch-*+cpu-*.whl"
    house = root / "wheelhouse"
    if found := sorted(house.glob(pattern)):
        return f"{found[0].name} of wheelhouse/"
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in sorted(Path(folder).glob(pattern)):
            house.mkdir(exist_ok=True)
            shutil.copyfile(wheel, house / wheel.name)
            return f"{wheel.name}, copied to wheelhouse/"
    return "pip's default build (for a small image put a CPU wheel into wheelhouse/)"
