"""What the start checks find on a host for NPUs, and that each finding has its remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.problems import Severity
from sluice.config.run import RunConfig
from sluice.device import host as ascend_host
from sluice.device.ascend_checks import AscendDemand, AscendHost, ascend_findings
from sluice.device.host import (
    device_numbers,
    launch_environment,
    nccl_environment,
    prepare_process,
    wants_npu,
)
from sluice.errors import ConfigError

_GOOD = AscendHost(
    environment={"ASCEND_HOME_PATH": "/cann", "ASCEND_RT_VISIBLE_DEVICES": "0,1"},
    torch_version="2.13.0",
    torch_npu_version="2.13.0.post1",
    num_devices=8,
    interfaces=frozenset({"lo", "eth0"}),
)
_DEMAND = AscendDemand(num_devices=2, collectives_on_device=True)


def test_a_host_that_is_well_set_up_has_no_findings() -> None:
    assert ascend_findings(_GOOD, _DEMAND) == ()


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        ({"torch_npu_version": None}, "torch_npu is not installed", "made for torch 2.13.0"),
        ({"torch_npu_version": "2.10.0"}, "made for torch 2.10, and torch is 2.13.0", "torch-npu"),
        ({"num_devices": 0}, "no /dev/davinci0", "install the driver"),
    ],
)
def test_a_host_without_a_package_names_what_to_install(
    change: dict[str, str | int | None], what: str, remedy: str
) -> None:
    (found,) = ascend_findings(replace(_GOOD, **change), _DEMAND)  # type: ignore[arg-type]
    assert found.severity is Severity.ERROR
    assert what in found.statement
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"ASCEND_RT_VISIBLE_DEVICES": "3"}, "2 NPUs are wanted and 1 are visible"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "a,b"}, "not a list of different numbers"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,1"}, "not a list of different numbers"),
        ({"HCCL_CONNECT_TIMEOUT": "60"}, "'60' is not a whole number from 120 to 7200 s"),
        ({"HCCL_EXEC_TIMEOUT": "soon"}, "'soon' is not a whole number"),
        ({"HCCL_BUFFSIZE": "0"}, "'0' is not a whole number from 1"),
        ({"HCCL_SOCKET_IFNAME": "=eth7"}, "no such interface, only eth0, lo"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "no such interface"),
        ({"HCCL_WHITELIST_DISABLE": "0"}, "HCCL_WHITELIST_FILE names none"),
    ],
)
def test_a_variable_that_cannot_work_is_named_with_its_value(
    variables: dict[str, str], what: str
) -> None:
    host = replace(_GOOD, environment={**_GOOD.environment, **variables})
    (found,) = ascend_findings(host, _DEMAND)
    assert found.severity is Severity.ERROR
    assert what in found.statement
    assert next(iter(variables)) in found.text


def test_a_replica_with_vllm_names_the_plugin_to_install() -> None:
    demand = replace(_DEMAND, runs_vllm=True)
    host = replace(_GOOD, vllm_version="0.23.0")
    (found,) = ascend_findings(host, demand)
    assert found.severity is Severity.ERROR
    assert "vllm_ascend is not installed" in found.statement
    assert "install the vllm-ascend wheel made for vllm 0.23.0" in found.remedy
    assert ascend_findings(replace(host, vllm_ascend_version="0.23.0rc1"), demand) == ()
    assert ascend_findings(host, _DEMAND) == (), "other processes do without"


def test_a_plugin_for_another_vllm_is_reported() -> None:
    host = replace(_GOOD, vllm_version="0.32.0", vllm_ascend_version="0.23.0")
    (found,) = ascend_findings(host, replace(_DEMAND, runs_vllm=True))
    assert found.severity is Severity.NOTE
    assert "made for vllm 0.23, and vllm is 0.32.0" in found.statement
    assert "install vllm-ascend 0.32" in found.remedy


@pytest.mark.parametrize(
    "variables", [{"HCCL_SOCKET_IFNAME": "eth"}, {"HCCL_ASYNC_ERROR_HANDLING": "2"}]
)
def test_what_may_work_is_left_alone(variables: dict[str, str]) -> None:
    host = replace(_GOOD, environment={**_GOOD.environment, **variables})
    assert ascend_findings(host, _DEMAND) == ()


def test_a_watchdog_that_ends_processes_is_reported_where_collectives_are_on_the_device() -> None:
    host = replace(_GOOD, environment={**_GOOD.environment, "HCCL_ASYNC_ERROR_HANDLING": "1"})
    (found,) = ascend_findings(host, _DEMAND)
    assert found.severity is Severity.NOTE
    assert ascend_findings(host, replace(_DEMAND, collectives_on_device=False)) == ()


def test_what_is_fatal_comes_first() -> None:
    host = replace(_GOOD, environment={}, torch_npu_version=None)
    found = ascend_findings(host, _DEMAND)
    assert [one.severity for one in found] == [Severity.ERROR, Severity.NOTE]


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("davinci10", "davinci2", "davinci_manager", "null", "vdavinci100"):
        (tmp_path / name).touch()
    monkeypatch.setattr(ascend_host, "has_torch_npu", lambda: True)
    return tmp_path


def test_the_npus_of_a_host_are_its_device_files_unless_a_variable_says_less(devices: Path) -> None:
    assert device_numbers({}, devices) == ("2", "10", "100")
    assert device_numbers({"ASCEND_RT_VISIBLE_DEVICES": "10, 2"}, devices) == ("10", "2")


@pytest.mark.parametrize(
    ("name", "visible", "wanted"),
    [("npu", "", True), ("cpu", "0", False), (None, "0", True), (None, "", False)],
)
def test_a_process_computes_on_an_npu_if_configured_or_found(
    name: str | None, visible: str, wanted: bool, devices: Path
) -> None:
    assert wants_npu(name, {"ASCEND_RT_VISIBLE_DEVICES": visible}, devices) is wanted


@pytest.fixture
def config() -> RunConfig:
    return load_config(None, [])


def test_only_processes_on_npus_get_hccls_variables(config: RunConfig, devices: Path) -> None:
    endpoint = config.sluice.trainer.endpoint
    assert "HCCL_CONNECT_TIMEOUT" in launch_environment(config, "npu", endpoint, {})
    assert launch_environment(config, "cpu", endpoint, {}) == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", {}, "32"),
        ("cuda:1", {}, "32"),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1"),
        ("cpu", {}, None),
    ],
)
def test_streams_of_a_gpu_have_queues_of_their_own_also_without_a_launcher(
    device: str, given: dict[str, str], expected: str | None, config: RunConfig
) -> None:
    endpoint, environment = config.sluice.trainer.endpoint, dict(given)
    prepare_process(config, device, endpoint, collectives_on_device=True, environment=environment)
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_a_process_configured_for_an_npu_begins_with_all_faults(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend_host, "_version", lambda _: None)
    environment = {"HCCL_CONNECT_TIMEOUT": "1"}
    with pytest.raises(ConfigError, match=r"(?s)torch_npu is not installed.*HCCL_CONNECT_TIMEOUT"):
        prepare_process(
            config,
            "npu",
            config.sluice.trainer.endpoint,
            collectives_on_device=True,
            environment=environment,
        )
    assert environment["HCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    ("overrides", "runs_vllm", "level"),
    [
        ([], False, "2"),
        ([], True, None),
        (["actor_rollout_ref.rollout.enforce_eager=true"], True, "2"),
    ],
    ids=["no vLLM", "vLLM with graphs", "vLLM without graphs"],
)
def test_a_process_without_graphs_queues_operators_at_the_second_level(
    overrides: list[str], runs_vllm: bool, level: str | None, devices: Path
) -> None:
    config = load_config(None, overrides)
    endpoint = config.sluice.trainer.endpoint
    for given in ({}, {"TASK_QUEUE_ENABLE": "0", "HCCL_CONNECT_TIMEOUT": "5400"}):
        environment = {"ASCEND_RT_VISIBLE_DEVICES": "0", **given}
        prepare_process(
            config,
            "auto",
            endpoint,
            collectives_on_device=True,
            runs_vllm=runs_vllm,
            environment=environment,
        )
        assert environment.get("TASK_QUEUE_ENABLE") == given.get("TASK_QUEUE_ENABLE", level)
        assert environment["HCCL_CONNECT_TIMEOUT"] == given.get("HCCL_CONNECT_TIMEOUT", "120")


def test_a_process_on_another_device_gets_no_variable_of_cann(
    config: RunConfig, devices: Path
) -> None:
    for device in ("cpu", "cuda", "cuda:1"):
        environment: dict[str, str] = {}
        prepare_process(
            config,
            device,
            config.sluice.trainer.endpoint,
            collectives_on_device=True,
            environment=environment,
        )
        of_nccl = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **nccl_environment({})}
        assert environment == ({} if device == "cpu" else of_nccl)


def test_a_queue_with_which_no_graph_is_captured_is_refused_where_vllm_captures_some() -> None:
    host = replace(_GOOD, environment={**_GOOD.environment, "TASK_QUEUE_ENABLE": "2"})
    (found,) = ascend_findings(host, replace(_DEMAND, captures_graphs=True))
    assert found.severity is Severity.ERROR
    assert "enforce_eager=true" in found.text
    assert ascend_findings(host, _DEMAND) == ()


def prepare_vllm(device: str | None, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with an NPU, torch_npu and without vllm_ascend."""
    monkeypatch.setattr(ascend_host, "_version", lambda _: None)
    monkeypatch.setattr(ascend_host, "device_numbers", lambda *_: ("0",))
    endpoint = config.sluice.rollout.endpoint
    prepare_process(
        config, device, endpoint, collectives_on_device=True, runs_vllm=True, environment={}
    )


def test_a_replica_with_vllm_on_an_npu_does_not_begin_without_its_plugin(
    config: RunConfig, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = r"vllm_ascend is not installed, .*install the vllm-ascend"
    with pytest.raises(ConfigError, match=missing):
        prepare_vllm("npu", config, monkeypatch)


@pytest.mark.parametrize("device", ["auto", None])
def test_an_npu_that_detection_may_pass_over_ends_no_replica_but_the_log_says_what_lacks(
    device: str | None,
    config: RunConfig,
    devices: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare_vllm(device, config, monkeypatch)
    assert "vllm_ascend is not installed" in caplog.text
    assert "install the vllm-ascend" in caplog.text


def test_a_process_on_a_cpu_is_left_alone(config: RunConfig) -> None:
    environment: dict[str, str] = {}
    endpoint = config.sluice.trainer.endpoint
    prepare_process(config, "cpu", endpoint, collectives_on_device=True, environment=environment)
    assert environment == {}
