"""Write an image's requirements for pip: `image_requirements.py EXTRAS OUTPUT [WITHOUT [PINS]]`.

EXTRAS are those of pyproject.toml, separated by commas; extras that name others of the project are
resolved here, since the project itself is installed later. WITHOUT are packages that the base image
brings (torch of a vendor's build): neither asked for nor pinned. PINS is constraints.txt unless
given. Needs no package.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Return the project's dependencies with those of the extras."""
    yield from project["dependencies"]
    own = re.compile(re.escape(project["name"]) + r"\[([^\]]+)\]")
    waiting = list(extras)
    while waiting:
        for one in project["optional-dependencies"][waiting.pop(0)]:
            if (inner := own.fullmatch(one)) is not None:
                waiting += inner[1].split(",")
            else:
                yield one


def main(extras: str, output: str, without: str = "", pinned: str = "constraints.txt") -> None:
    """Write OUTPUT/requirements.txt and OUTPUT/constraints.txt."""
    document = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    left_out = {_key(name) for name in without.split(",") if name}
    wanted = [
        *document["build-system"]["requires"],
        *requirements(document["project"], [name for name in extras.split(",") if name]),
    ]
    pins = Path(pinned).read_text(encoding="utf-8").splitlines()
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("requirements.txt", wanted), ("constraints.txt", pins)):
        kept = [line for line in lines if line[:1] != "#" and _key(line) not in left_out]
        (folder / name).write_text("\n".join(dict.fromkeys(kept)) + "\n", encoding="utf-8")


def _key(requirement: str) -> str:
    found = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
