"""The files of exact versions agree with each other, and with what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES
from tests.support.source_tree import ROOT, name_of

FILES = sorted(ROOT.glob("constraints*.txt"))


def pins(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line[:1] != "#"]
    assert all(found), f"{file.name} has a line that is no exact version"
    return {canonicalize_name(one[1]): one[2] for one in found if one}


def wanted(extras: list[str]) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, found = list(extras), [Requirement(one) for one in project["dependencies"]]
    while waiting:
        for one in map(Requirement, project["optional-dependencies"][waiting.pop()]):
            if one.name == project["name"]:
                waiting += sorted(one.extras)
            else:
                found.append(one)
    return found


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_version_is_exact_and_given_once(file: Path) -> None:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert len(pins(file)) == len(lines)


@pytest.mark.parametrize("engine", VENDOR_ENGINES)
def test_an_engines_environment_for_cuda_meets_what_sluice_asks_for(engine: str) -> None:
    found = pins(ROOT / f"constraints-{engine}-cuda.txt")
    for requirement in wanted([engine, "train", "dashboard", "metrics", "traces"]):
        assert found[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("engine", VENDOR_ENGINES)
def test_an_engine_for_cuda_has_the_version_that_is_tested_on_the_cpu(engine: str) -> None:
    tested, cuda = (
        pins(ROOT / f"constraints-{engine}.txt"),
        pins(ROOT / f"constraints-{engine}-cuda.txt"),
    )
    assert cuda[engine] == tested.get(engine, tested.get(f"{engine}-cpu"))
    assert cuda["transformers"] == tested["transformers"]


def test_vllm_for_cuda_has_the_torch_that_everything_is_tested_with() -> None:
    torch = pins(ROOT / "constraints-vllm-cuda.txt")["torch"]
    assert torch == pins(ROOT / "constraints.txt")["torch"]
