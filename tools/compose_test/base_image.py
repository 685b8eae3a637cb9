"""The image that the project's own is built from: there, pulled, or a stand-in."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from tools.commands import CommandError, output_of, succeeds

_SCRIPT = Path(__file__).with_name("stand_in.sh")
_PULL_WITHIN_S, _MADE_WITHIN_S = 300.0, 600.0


class NoBaseImageError(Exception):
    """Why there is no base image."""


def base_image(tag: str) -> str:
    """Provide the image `tag`; return where it came from.

    Raises:
        NoBaseImageError: it is not here, cannot be pulled, and this machine makes no stand-in.
    """
    if succeeds("docker", "image", "inspect", tag, timeout_s=30):
        return "was here"
    try:
        output_of("docker", "pull", "-q", tag, timeout_s=_PULL_WITHIN_S)
    except CommandError as error:
        pulling = str(error).splitlines()[-1].strip()
    else:
        return "pulled"
    try:
        _check_machine()
        output_of(str(_SCRIPT), sys.base_prefix, tag, timeout_s=_MADE_WITHIN_S)
    except (CommandError, OSError) as error:
        raise NoBaseImageError(f"{tag} cannot be pulled ({pulling}), nor made: {error}") from error
    return "a stand-in made of this machine's files"


def _check_machine() -> None:
    if os.geteuid() != 0 or sys.version_info[:2] != (3, 11) or not shutil.which("dpkg-query"):
        raise OSError("a stand-in takes Debian, root, and this program run by Python 3.11")
    if find_spec("ensurepip") is None or sys.base_prefix == "/usr":
        raise OSError(
            "a stand-in takes a Python 3.11 with pip of its own, and Debian's comes without: give "
            "another one (make compose-test PYTHON=/path/to/python3.11)"
        )
