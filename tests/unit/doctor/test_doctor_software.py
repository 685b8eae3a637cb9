"""Findings about packages, torch and engines, from facts."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement as Specified
from packaging.version import Version

from sluice.doctor import packages
from sluice.doctor.packages import (
    Requirement,
    TorchBuild,
    build_finding,
    check_extras,
    check_torch,
    is_older,
    missing_for_triton,
    needed_extras,
    requirement_findings,
    requirements,
)
from tests.support.doctor_findings import only, run_of, severities
from tests.support.source_tree import ROOT

WITH_GPUS = TorchBuild(cuda="12.9", num_usable=2)
OLD_DRIVER = TorchBuild(cuda="12.9", reason="The NVIDIA driver on your system is too old")
FOR_CPU = TorchBuild(reason="Torch not compiled with CUDA enabled")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with torch for CUDA, without a C compiler."""
    monkeypatch.setattr(packages, "is_cpu_torch", lambda: False)
    monkeypatch.setattr(packages.shutil, "which", lambda _: None)
    monkeypatch.setattr(packages.Path, "is_file", lambda _: True)
    monkeypatch.setattr(packages, "requirements", lambda _: iter(()))


_COMPILED = "actor_rollout_ref.actor.fsdp_config.use_torch_compile=true"


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("overrides", "environment", "needs"),
    [
        (("actor_rollout_ref.rollout.name=vllm", "sluice.rollout.device=cuda"), {}, True),
        (("actor_rollout_ref.rollout.name=sglang", "sluice.rollout.device=cuda:1"), {}, True),
        ((_COMPILED, "trainer.device=cuda"), {}, True),
        ((_COMPILED, "trainer.device=cuda"), {"CC": "/opt/cc"}, False),
        (("trainer.device=cuda", "sluice.rollout.device=cuda"), {}, False),
        (("actor_rollout_ref.rollout.name=vllm", "sluice.rollout.device=cpu"), {}, False),
    ],
)
def test_what_triton_compiles_on_gpus_needs_a_compiler(
    overrides: tuple[str, ...], environment: dict[str, str], needs: bool
) -> None:
    found = [*check_extras(run_of(*overrides, environment=environment))]
    assert severities(found) == ["ok", *(["problem"] if needs else [])]
    if needs:
        assert found[1].what.endswith("on a GPU, and there is no C compiler")
        assert "gcc" in found[1].remedy


def test_headers_of_python_that_are_not_there_are_named(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.Path, "is_file", lambda _: False)
    (headers,) = missing_for_triton({"CC": "/opt/cc"})
    assert headers.endswith("Python.h")


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
    assert {"torch", "transformers"} <= {one.name for one in requirements("torch")}
    assert {one.name: one.oldest for one in requirements("vllm")}["vllm"] == "0.23"
    assert {one.name: one.oldest for one in requirements("sglang")}["sglang"] == "0.5.23"


def test_a_missing_and_an_old_package_are_each_named_with_the_command() -> None:
    needed = (
        Requirement("numpy", "2.0", "2.3"),
        Requirement("wandb", "0.31", "0.30.2"),
        Requirement("mlflow", "3.17", None),
    )
    old, missing = requirement_findings(("a key = wandb", "all", one) for one in needed)
    assert old.what == "a key = wandb needs a package: wandb 0.30.2 is older than 0.31"
    assert old.remedy == "pip install 'sluice[all]', or take wandb out"
    assert missing.what == "a key = wandb needs a package: mlflow is not installed"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_needs_its_package(engine: str) -> None:
    run = run_of(f"actor_rollout_ref.rollout.name={engine}")
    assert list(needed_extras(run.config)) == [
        (f"actor_rollout_ref.rollout.name = {engine}", engine)
    ]
    missing = ("a key", engine, Requirement(engine, "1", None))
    found = only(requirement_findings([missing]), "problem")
    assert found.remedy.endswith(f"'sluice[{engine}]', or set actor_rollout_ref.rollout.name=torch")


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


def test_torch_is_examined_from_a_source_tree_without_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "requirements", lambda _: iter(()))
    monkeypatch.setattr(packages, "probe_torch", lambda _: TorchBuild())
    (found,) = check_torch(run_of("trainer.device=cpu", "sluice.rollout.device=cpu"))
    assert found.what.startswith(f"torch {packages.installed_version('torch')}")


def test_a_torch_that_cannot_be_imported_is_a_problem_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "_PROBE", "raise ImportError('libcudart.so.12 is missing')")
    assert "libcudart.so.12 is missing" in only(check_torch(run_of()), "problem").what


def extra(name: str) -> dict[str, Specified]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = map(Specified, document["project"]["optional-dependencies"][name])
    return {one.name: one for one in named}


def test_the_extra_of_an_engine_takes_the_versions_that_its_page_names() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    versions = extra("vllm")["vllm"].specifier
    tried = ("0.22.1", "0.23.0", "0.33.2", "0.34.0")
    assert [one for one in tried if Version(one) in versions] == ["0.23.0", "0.33.2"]
    assert "vLLM 0.23 to 0.33" in page
    assert str(extra("sglang")["sglang"].specifier) == "==0.5.23"
    assert "SGLang 0.5.23" in page
    assert all(extra(name)["sluice"].extras == {"torch"} for name in ("vllm", "sglang"))


def test_the_extra_of_npus_asks_for_a_torch_npu_of_a_torch_that_will_do() -> None:
    (torch_npu,) = extra("npu")["torch-npu"].specifier
    (torch,) = extra("torch")["torch"].specifier
    assert str(torch_npu) == str(torch)
