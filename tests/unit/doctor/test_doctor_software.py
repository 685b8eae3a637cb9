"""Findings about packages, torch and engines, from facts."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement as Specified
from packaging.version import Version

from sluice.doctor import packages
from sluice.doctor.packages import (
    SUPPORTED,
    Requirement,
    TorchBuild,
    build_finding,
    check_engine,
    check_extras,
    check_requirements,
    check_torch,
    engine_finding,
    is_older,
    needed_extras,
    requirement_findings,
    requirements,
)
from tests.support.doctor_findings import only, run_of, severities
from tests.support.source_tree import ROOT

WITH_GPUS = TorchBuild(cuda="12.9", num_usable=2)
OLD_DRIVER = TorchBuild(cuda="12.9", reason="The NVIDIA driver on your system is too old")
FOR_CPU = TorchBuild(reason="Torch not compiled with CUDA enabled")


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
    names = {one.name for one in requirements()}
    assert {"grpcio", "protobuf", "msgspec"} <= names
    assert "torch" not in names
    assert "torch" in {one.name for one in requirements("torch")}


def test_a_missing_and_an_old_package_are_each_named_with_the_command() -> None:
    needed = (
        Requirement("numpy", "2.0", "2.3"),
        Requirement("grpcio", "1.71", "1.62.0"),
        Requirement("msgspec", "0.19", None),
    )
    old, missing = requirement_findings(("", "", one) for one in needed)
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
    assert [extra for _, extra in needed_extras(examined.config)] == [
        "wandb",
        "metrics",
        "dashboard",
        "traces",
        "math-verify",
    ]
    assert list(needed_extras(run_of().config)) == []
    assert {one.name for _, extra in needed_extras(examined.config) for one in requirements(extra)}


def test_a_missing_optional_package_is_reported_once_with_the_key_that_needs_it() -> None:
    missing = Requirement("aiohttp", "3.11", None)
    present = ("third", "wandb", Requirement("wandb", "0.31", "0.31.2"))
    needed = (("first", "dashboard", missing), ("second", "dashboard", missing), present)
    found = only(requirement_findings(needed), "problem")
    assert found.what == "first needs a package: aiohttp is not installed"
    assert found.remedy == "pip install 'sluice[dashboard]', or take the key out"
    assert only(requirement_findings([present]), "ok").what == "wandb 0.31.2"
    only(check_extras(run_of()), "ok")


def test_this_environment_has_what_every_process_needs() -> None:
    assert set(severities(check_requirements(run_of()))) == {"ok"}


@pytest.mark.parametrize(
    ("build", "num_devices", "keys", "may_use_gpu", "severity", "words"),
    [
        (WITH_GPUS, 2, [], True, "ok", "torch 2.13.0 for CUDA 12.9, 2 GPU(s)"),
        (FOR_CPU, 2, [], True, "problem", "for the CPU can use none of 2 NVIDIA GPU(s): Torch not"),
        (
            OLD_DRIVER,
            2,
            [],
            True,
            "problem",
            "CUDA 12.9 can use none of 2 NVIDIA GPU(s): The NVIDI",
        ),
        (FOR_CPU, 0, ["trainer.device"], False, "problem", "no GPU, but trainer.device asks for"),
        (FOR_CPU, 0, [], True, "ok", "none of 0 NVIDIA GPU(s)"),
        (OLD_DRIVER, 0, [], True, "ok", "none of 0 NVIDIA GPU(s)"),
        (FOR_CPU, 2, [], False, "ok", "none of 2 NVIDIA GPU(s)"),
    ],
)
def test_torch_is_compared_with_the_machine_and_the_run(
    build: TorchBuild,
    num_devices: int,
    keys: list[str],
    may_use_gpu: bool,
    severity: str,
    words: str,
) -> None:
    found = build_finding(
        "torch 2.13.0", build, num_devices=num_devices, keys=keys, may_use_gpu=may_use_gpu
    )
    assert words in only([found], severity).what


@pytest.mark.parametrize(
    ("installed", "words"), [(None, "torch is not installed"), ("2.4.0", "2.4.0 is older than 2.9")]
)
def test_a_missing_or_old_torch_is_a_problem(
    installed: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = Requirement("torch", "2.9", installed)
    monkeypatch.setattr(packages, "requirements", lambda _: iter([torch]))
    assert words in only(check_torch(run_of()), "problem").what


def test_a_torch_that_cannot_be_imported_is_a_problem_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "_PROBE", "raise ImportError('libcudart.so.12 is missing')")
    assert "libcudart.so.12 is missing" in only(check_torch(run_of()), "problem").what


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
