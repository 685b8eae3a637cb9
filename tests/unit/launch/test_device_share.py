"""Which NPUs a run's processes get, and what else the launcher tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.loader import load_config
from sluice.errors import ConfigError
from sluice.launch.device_share import DeviceShare
from sluice.launch.service_spec import ServiceSpec, local_services, rollout_service, with_ports

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_ON_NPUS = ("trainer.device=npu", "sluice.rollout.device=npu")


@pytest.fixture(autouse=True)
def eight_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VISIBLE, "0,1,2,3,4,5,6,7")
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_IF_IP"):
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


def test_processes_on_npus_are_told_hccls_variables_and_the_reward_service_is_not() -> None:
    specs = _services(*_ON_NPUS, "sluice.weights.timeout_s=200")
    assert specs["trainer"].environment["HCCL_CONNECT_TIMEOUT"] == "200"
    assert specs["rollout-0"].environment["HCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert not any(name.startswith("HCCL") for name in specs["reward"].environment)


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
    with pytest.raises(ConfigError, match=r"replica 0 would get NPU number 2 of 1 \(5\).*replicas"):
        _services(*_ON_NPUS)


def test_a_replica_of_several_devices_gets_neighbours() -> None:
    share = DeviceShare(("0", "1", "2", "3", "4"), trainer_ranks=1, devices_per_replica=2)
    assert [share.of_replica(0), share.of_replica(1)] == ["1,2", "3,4"]
    with pytest.raises(ConfigError, match="replica 2"):
        share.of_replica(2)
