"""Which NPUs or GPUs a run's processes get, and what else the launcher passes to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.device.host import gpu_numbers
from sluice.errors import ConfigError
from sluice.launch.device_plan import DeviceShare
from sluice.launch.service_spec import ServiceSpec, local_services, rollout_service, with_ports

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_GPUS = "CUDA_VISIBLE_DEVICES"
_ON_NPUS = ("trainer.device=npu", "sluice.rollout.device=npu")


@pytest.fixture(autouse=True)
def eight_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VISIBLE, "0,1,2,3,4,5,6,7")
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_IF_IP", _GPUS):
        monkeypatch.delenv(name, raising=False)


def _services(*overrides: str) -> dict[str, ServiceSpec]:
    config = with_ports(load_config(None, overrides))
    return {spec.name: spec for spec in local_services(config, Path("run.yaml"))}


def test_every_process_has_npus_of_its_own_ranks_first() -> None:
    specs = _services(*_ON_NPUS, "trainer.n_gpus_per_node=2", "sluice.rollout.replicas=2")
    assert {name: spec.environment.get(_VISIBLE) for name, spec in specs.items()} == {
        "reward": None,
        "trainer": "0",
        "trainer-1": "1",
        "rollout-0": "2",
        "rollout-1": "3",
    }


def test_processes_on_npus_are_reported_hccls_variables_and_the_reward_service_is_not() -> None:
    specs = _services(*_ON_NPUS, "sluice.weights.timeout_s=200")
    assert specs["trainer"].environment["HCCL_CONNECT_TIMEOUT"] == "200"
    assert specs["rollout-0"].environment["HCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert not any(name.startswith("HCCL") for name in specs["reward"].environment)


def test_a_variable_that_the_user_has_set_reaches_processes_on_npus_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {
        "HCCL_CONNECT_TIMEOUT": "5400",
        "HCCL_ASYNC_ERROR_HANDLING": "1",
        "HCCL_IF_IP": "10.0.0.1",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for spec in _services(*_ON_NPUS).values():
        assert not own.keys() & spec.environment.keys(), "a process inherits what it is not given"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_beside_those_on_npus_gets_none_of_their_variables(device: str) -> None:
    specs = _services("trainer.device=npu", f"sluice.rollout.device={device}")
    assert "HCCL_CONNECT_TIMEOUT" in specs["trainer"].environment
    for name in ("reward", "rollout-0", "rollout-1"):
        if name in specs:
            given = specs[name].environment
            assert not any(one.startswith(("HCCL_", "ASCEND_", "TASK_")) for one in given), name


def test_a_replica_that_joins_later_gets_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VISIBLE, "4,6,7")
    config = load_config(None, _ON_NPUS)
    environments = [rollout_service(config, Path("c"), i).environment for i in range(2)]
    assert [environment[_VISIBLE] for environment in environments] == ["6", "7"]


def test_a_run_on_cpus_hands_out_nothing() -> None:
    specs = _services("trainer.device=cpu", "sluice.rollout.device=cpu")
    assert not any(_VISIBLE in spec.environment for spec in specs.values())


def test_replicas_take_the_first_ones_where_the_trainer_takes_none() -> None:
    specs = _services("trainer.device=cpu", "sluice.rollout.device=npu")
    assert specs["rollout-0"].environment[_VISIBLE] == "0"
    assert _VISIBLE not in specs["trainer"].environment


def test_too_few_npus_are_an_error_with_the_keys_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(_VISIBLE, "5")
    with pytest.raises(ConfigError, match=r"replica 0 would take 1 .* of 1 \(5\) 0 are .*replicas"):
        _services(*_ON_NPUS)


def test_a_replica_of_several_devices_gets_neighbours() -> None:
    share = DeviceShare(("0", "1", "2", "3", "4"), trainer_ranks=1, devices_per_replica=2)
    assert [share.of_replica(index) for index in range(3)] == [("1", "2"), ("3", "4"), ()]
    assert [len(share.numbers) >= share.num_wanted(replicas) for replicas in (2, 3)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("key", ["trainer.device", "sluice.rollout.device"])
def test_an_npu_named_by_its_number_is_refused_with_the_remedy(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{key}=npu:3: .*set {key}=npu, and {_VISIBLE} .*3 first"
    ):
        _services(*_ON_NPUS, f"{key}=npu:3")


def _gpus(monkeypatch: pytest.MonkeyPatch, visible: str, *overrides: str) -> dict[str, str | None]:
    monkeypatch.setenv(_GPUS, visible)
    monkeypatch.setenv(_VISIBLE, "")
    found = {name: spec.environment.get(_GPUS) for name, spec in _services(*overrides).items()}
    assert found.pop("reward") is None
    return found


_ON_GPUS = ("trainer.device=cuda", "sluice.rollout.device=cuda")


def test_gpus_are_handed_out_as_npus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ("trainer.n_gpus_per_node=2", "sluice.rollout.replicas=2")
    assert _gpus(monkeypatch, "0,1,4,GPU-5a", *_ON_GPUS, *two) == {
        "trainer": "0",
        "trainer-1": "1",
        "rollout-0": "4",
        "rollout-1": "GPU-5a",
    }


def test_a_replica_of_several_workers_gets_a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = "actor_rollout_ref.rollout"
    parallel = (f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=2")
    assert _gpus(monkeypatch, "0,1,2", *_ON_GPUS, *parallel) == {"trainer": "0", "rollout-0": "1,2"}


def test_with_too_few_gpus_every_process_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(_gpus(monkeypatch, "0", *_ON_GPUS).values()) == {None}


def test_a_replica_that_joins_later_gets_a_gpu_of_its_own_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.device.host.is_cpu_torch", lambda: False)
    monkeypatch.setenv(_GPUS, "0,1,2")
    monkeypatch.setenv(_VISIBLE, "")
    config = load_config(None, _ON_GPUS)
    assert rollout_service(config, Path("c"), 1).environment[_GPUS] == "2"
    with pytest.raises(
        ConfigError, match=r"replica 2 would take 1 GPU.* of 3 \(0, 1, 2\) 0 are left.*at most 2"
    ):
        rollout_service(config, Path("c"), 2)
    by_hand = load_config(None, [*_ON_GPUS, "sluice.weights.backend=gloo"])
    assert _GPUS not in rollout_service(by_hand, Path("c"), 2).environment


def test_gpus_are_what_an_automatic_device_takes_where_there_is_no_npu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _gpus(monkeypatch, "0,1") == {"trainer": "0", "rollout-0": "1"}


def test_a_gpu_that_a_key_names_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("trainer.device=cuda:1", "sluice.rollout.device=cuda")
    assert set(_gpus(monkeypatch, "0,1", *chosen).values()) == {None}


def test_gpus_are_counted_by_the_drivers_files_and_numbered_from_0_as_cuda_does(
    tmp_path: Path,
) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_numbers({}, tmp_path) == ("0", "1")
    assert gpu_numbers({_GPUS: ""}, tmp_path) == ()
