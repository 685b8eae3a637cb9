"""The two images, built and checked, and the one that they are built from."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from tools.commands import CommandError, output_of, succeeds
from tools.compose_test.project import TAG, Project
from tools.phases import Phases, say

BASE_IMAGE = "python:3.11-slim"
_IMAGES = ("sluice", "sluice-reward")
_STAND_IN = Path(__file__).with_name("stand_in.sh")
_PULL_S, _MAKE_S, _BUILD_S, _LOOK_S, _REMOVE_S = 300.0, 600.0, 3600.0, 60.0, 300.0
_WITHOUT_TORCH = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"


def build(project: Project, phases: Phases) -> None:
    """Provide the base image, and build both; raise CommandError if it failed."""
    with phases.phase("base image"):
        say(f"{BASE_IMAGE}: {_base_image()}; torch: {_cpu_torch(project.folder)}")
    with phases.phase("build"):
        project.run("build", timeout_s=_BUILD_S)


def _base_image() -> str:
    """Provide the base image: a local one, a pulled one or a stand-in; return where it came from.

    Raises:
        CommandError: it is not here, cannot be pulled, and this machine makes no stand-in.
    """
    if succeeds("docker", "image", "inspect", BASE_IMAGE, timeout_s=_LOOK_S):
        return "was here"
    try:
        output_of("docker", "pull", "-q", BASE_IMAGE, timeout_s=_PULL_S)
    except CommandError as error:
        pulling = str(error).splitlines()[-1].strip()
    else:
        return "pulled"
    try:
        _check_machine()
        output_of(str(_STAND_IN), sys.base_prefix, BASE_IMAGE, timeout_s=_MAKE_S)
    except CommandError as error:
        raise CommandError(
            f"{BASE_IMAGE} cannot be pulled ({pulling}), nor made: {error}"
        ) from error
    return "a stand-in made of this machine's files"


def _check_machine() -> None:
    if os.geteuid() != 0 or sys.version_info[:2] != (3, 11) or not shutil.which("dpkg-query"):
        raise CommandError("a stand-in takes Debian, root, and this program run by Python 3.11")
    if find_spec("ensurepip") is None or sys.base_prefix == "/usr":
        raise CommandError(
            "a stand-in takes a Python 3.11 with pip of its own, and Debian's comes without: give "
            "another one (make compose-test PYTHON=/path/to/python3.11)"
        )


def check_reward_image() -> None:
    """Check that the reward service's image holds no torch; raise CommandError if it does."""
    run = ("docker", "run", "--rm", "--entrypoint", "python", f"sluice-reward:{TAG}")
    try:
        output_of(*run, "-c", _WITHOUT_TORCH, timeout_s=_LOOK_S)
    except CommandError as error:
        raise CommandError(f"the reward image holds torch, or did not start: {error}") from error


def remove_images() -> None:
    """Remove images of this test; layers stay for the next build, until `docker builder prune`."""
    names = [f"{name}:{TAG}" for name in _IMAGES]
    succeeds("docker", "image", "rm", *names, timeout_s=_REMOVE_S)


def _cpu_torch(root: Path) -> str:
    """Put torch's CPU wheel into `wheelhouse/`, if pip's own find-links hold it.

    Returns:
        what the image will take.
    """
    pin = re.search(r"^torch==(\S+)$", (root / "constraints.txt").read_text("utf-8"), re.MULTILINE)
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
