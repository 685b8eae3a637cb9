"""Findings about packages, torch and engines, from facts."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement as Specified
from packaging.version import Version

from sluice.doctor.packages import (
    SUPPORTED,
    Requirement,
    TorchFacts,
    asked_extras,
    check_engine,
    check_extras,
    check_requirements,
    driver_version,
    engine_finding,
    extra_findings,
    is_older,
    requirement_findings,
    requirements,
    torch_finding,
)
from tests.support.doctor_findings import only, run_of, severities
from tests.support.source_tree import ROOT

TORCH = TorchFacts("2.13.0", "2.9", cuda="12.9", num_usable=2, num_devices=2, driver="570.1")


def reported(severity: str, **changes: Any) -> str:
    facts = dataclasses.replace(TORCH, **changes)
    return only([torch_finding(facts)], severity).what


@pytest.mark.parametrize(
    ("version", "than", "is_it"),
    [
        ("1.71.2", "1.71", False),
        ("1.9", "1.71", True),
        ("2.13.0+cpu", "2.9", False),
        ("2.9", "2.9.1", True),
        ("2.9.0", "2.9", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, than: str, is_it: bool) -> None:
    assert is_older(version, than) is is_it


def test_requirements_are_those_of_the_packages_metadata() -> None:
    names = {one.name for one in requirements("")}
    assert {"grpcio", "protobuf", "msgspec"} <= names
    assert "torch" not in names
    assert "torch" in {one.name for one in requirements("torch")}


def test_a_missing_and_an_old_package_are_each_named_with_the_command() -> None:
    needed = (
        Requirement("numpy", "2.0", "", "2.3"),
        Requirement("grpcio", "1.71", "", "1.62.0"),
        Requirement("msgspec", "0.19", "", None),
    )
    old, missing = requirement_findings(needed)
    assert old.what == "grpcio 1.62.0 is older than 1.71"
    assert old.remedy == "pip install 'sluice'"
    assert missing.what == "msgspec is not installed"


def test_what_the_configuration_switches_on_needs_its_package() -> None:
    examined = run_of(
        "trainer.logger=[console,wandb]",
        "sluice.dashboard.port=0",
        "sluice.reward.endpoint.metrics_port=0",
        "sluice.telemetry.traces.endpoint=http://127.0.0.1:4317",
        "reward.scorer_routes={mine: math_verify}",
    )
    assert [extra for _, extra in asked_extras(examined.config)] == [
        "wandb",
        "metrics",
        "dashboard",
        "traces",
        "math-verify",
    ]
    assert list(asked_extras(run_of().config)) == []
    assert {one.name for _, extra in asked_extras(examined.config) for one in requirements(extra)}


def test_a_missing_optional_package_is_told_once_with_the_key_that_asks_for_it() -> None:
    missing = Requirement("aiohttp", "3.11", "dashboard", None)
    there = Requirement("wandb", "0.31", "wandb", "0.31.2")
    asked = (("first", missing), ("second", missing), ("third", there))
    found = only(extra_findings(asked), "problem")
    assert found.what == "first needs a package: aiohttp is not installed"
    assert found.remedy == "pip install 'sluice[dashboard]', or take the key out"
    assert only(extra_findings((("third", there),)), "ok").what == "all there: wandb"
    only(check_extras(run_of()), "ok")


def test_this_environment_has_what_every_process_needs() -> None:
    assert set(severities(check_requirements(run_of()))) == {"ok"}


def test_a_build_with_driver_and_devices_is_fine() -> None:
    assert reported("ok") == "torch 2.13.0 for CUDA 12.9, 2 GPU(s)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": None}, "torch is not installed"),
        ({"version": "2.4.0"}, "torch is 2.4.0, which is too old"),
        ({"import_error": "libcudart.so.12 is missing"}, "libcudart.so.12 is missing"),
        ({"cuda": None, "num_usable": 0}, "there are 2 NVIDIA GPU(s)"),
        ({"num_usable": 0, "driver": "470.82.01"}, "older than 525.60.13, which CUDA 12.9 needs"),
        ({"num_usable": 0, "driver": None}, "the kernel's driver is not loaded"),
        ({"num_usable": 0}, "driver 570.1 is not the reason"),
        (
            {"num_usable": 0, "num_devices": 0, "keys": ("trainer.device",)},
            "there is no GPU, but trainer.device asks for one",
        ),
    ],
)
def test_what_does_not_belong_together_is_a_problem(changes: dict[str, Any], words: str) -> None:
    assert words in reported("problem", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cuda": None, "num_usable": 0, "num_devices": 0},
        {"num_usable": 0, "num_devices": 0},
        {"cuda": None, "num_usable": 0, "may_use_gpu": False},
    ],
)
def test_a_build_without_gpus_is_fine_where_nobody_misses_one(changes: dict[str, Any]) -> None:
    reported("ok", **changes)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n", "535.129.03"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            "580.95.05",
        ),
        ("nothing\n", None),
    ],
)
def test_the_drivers_version_is_read_in_both_of_its_forms(
    text: str, version: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text(text, encoding="utf-8")
    assert driver_version(file) == version
    assert driver_version(tmp_path / "none") is None


def test_an_engine_of_our_own_needs_no_package() -> None:
    assert "torch needs no package" in only([engine_finding("torch", None)], "ok").what


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        (None, "problem"),
        ("0.22.1", "problem"),
        ("0.23.0", "ok"),
        ("0.33.2", "ok"),
        ("0.34.0", "warning"),
    ],
)
def test_an_engine_is_compared_with_what_its_adapter_ran_with(
    version: str | None, severity: str
) -> None:
    assert "0.23" in str(only([engine_finding("vllm", version)], severity))


def test_the_versions_of_engines_are_those_of_their_page() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert re.search(rf"vLLM {SUPPORTED['vllm'].oldest} to {SUPPORTED['vllm'].newest}\b", page)
    assert f"SGLang {SUPPORTED['sglang'].oldest}" in page


def test_the_engine_of_the_run_is_the_one_that_is_looked_for() -> None:
    found = list(check_engine(run_of("actor_rollout_ref.rollout.name=sglang")))
    assert any("sglang" in one.what for one in found)


def extra(name: str) -> dict[str, Specified]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = map(Specified, document["project"]["optional-dependencies"][name])
    return {one.name: one for one in named}


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_the_extra_of_an_engine_takes_the_versions_that_its_adapter_is_for(name: str) -> None:
    asked, supported = extra(name), SUPPORTED[name]
    assert asked["sluice"].extras == {"torch"}
    for version in (supported.oldest, supported.newest):
        assert Version(f"{version}.0") in asked[name].specifier
    oldest, newest = Version(supported.oldest), Version(supported.newest)
    before = f"{oldest.major}.{oldest.minor}.{oldest.micro - 1}" if oldest.micro else "0.22.1"
    after = f"{newest.major}.{newest.minor + 1}.0"
    assert all(Version(other) not in asked[name].specifier for other in (before, after))


def test_the_extra_of_npus_asks_for_a_torch_npu_of_a_torch_that_will_do() -> None:
    (torch_npu,) = extra("npu")["torch-npu"].specifier
    (torch,) = extra("torch")["torch"].specifier
    assert str(torch_npu) == str(torch)
