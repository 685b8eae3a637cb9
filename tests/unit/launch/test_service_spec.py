"""Which processes make up a run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from sluice.config.addresses import peer_address
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.launch import service_spec
from sluice.launch.service_spec import (
    NO_RESTARTS,
    ServiceSpec,
    local_services,
    own_address,
    replica_number,
    with_ports,
)
from sluice.service_contract import MARK_VARIABLE, TRACKER_NAME
from tests.support.loopback import needs_ipv6

FILE = Path("run.yaml")


def config(*overrides: str) -> RunConfig:
    return load_config(None, overrides)


def services(*overrides: str) -> dict[str, ServiceSpec]:
    specs = local_services(with_ports(config(*overrides)), FILE)
    assert len({each.name for each in specs}) == len(specs)
    return {each.name: each for each in specs}


def test_a_run_is_one_reward_service_one_trainer_and_its_replicas() -> None:
    assert list(services("sluice.rollout.replicas=2")) == [
        "reward",
        "trainer",
        "rollout-0",
        "rollout-1",
    ]


def test_all_trainer_ranks_are_one_crew_and_only_rank_0_ends_the_run() -> None:
    specs = services("trainer.n_gpus_per_node=2").values()
    crews = {each.name: each.crew_name for each in specs}
    assert crews == {
        "reward": "reward",
        "trainer": "trainer",
        "trainer-1": "trainer",
        "rollout-0": "rollout-0",
    }
    assert [each.name for each in specs if each.ends_run] == ["trainer"]
    assert [each.name for each in specs if each.is_needed] == ["reward", "trainer", "trainer-1"]


def test_every_service_may_be_started_again_but_only_replicas_after_errors_of_their_own() -> None:
    specs = services("trainer.n_gpus_per_node=2").values()
    assert {each.restarts.max_restarts for each in specs} == {5}
    assert [each.name for each in specs if each.restarts.retries_errors] == ["rollout-0"]


@pytest.mark.parametrize(("engine", "start_s"), [("torch", 120), ("vllm", 600)])
def test_a_service_is_in_a_crash_loop_as_long_as_it_may_take_to_start(
    engine: str, start_s: float
) -> None:
    waits = "sluice.trainer.replica_wait_timeout_s=86400"  # for capacity, which is no life
    specs = services(f"actor_rollout_ref.rollout.name={engine}", waits)
    lives = {name: spec.restarts.stable_s for name, spec in specs.items()}
    assert lives == {"reward": 120, "trainer": start_s, "rollout-0": start_s}


def test_the_trainer_is_reported_which_checkpoints_were_there_before_the_run(
    tmp_path: Path,
) -> None:
    def mark() -> str:
        folder = f"trainer.default_local_dir={tmp_path}"
        return services(folder)["trainer"].environment[MARK_VARIABLE]

    def save(step: int) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(str(step), encoding="ascii")
        fresh.replace(tmp_path / TRACKER_NAME)

    marks = [mark()]
    for step in (2, 4, 4):
        save(step)
        assert mark() == mark()
        marks.append(mark())
    assert len(set(marks)) == len(marks)


def test_a_reward_service_is_started_again_where_its_ledger_outlives_it_and_it_did_not_refuse() -> (
    None
):
    reward = services()["reward"]
    assert (reward.restarts.max_restarts, reward.restarts.retries_errors) == (5, False)
    assert services("sluice.reward.ledger=memory")["reward"].restarts == NO_RESTARTS


def test_each_trainer_rank_is_reported_who_it_is_and_where_to_meet() -> None:
    ranks = [
        each.environment
        for name, each in services("trainer.n_gpus_per_node=2").items()
        if name.startswith("trainer")
    ]
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_services_on_ipv6_get_free_ports_there_and_addresses_with_brackets(host: str) -> None:
    hosts = [f"sluice.{name}.endpoint.host='{host}'" for name in ("trainer", "reward")]
    chosen = with_ports(config(*hosts))
    endpoint = chosen.sluice.reward.endpoint
    assert peer_address(endpoint, "reward") == f"[::1]:{endpoint.port}"
    assert endpoint.port not in (0, chosen.sluice.trainer.endpoint.port)
    rank = services("trainer.n_gpus_per_node=2", *hosts)["trainer-1"].environment
    assert rank["MASTER_ADDR"] == "::1"


@pytest.mark.parametrize("name", ["trainer", "rollout-0"])
def test_torch_threads_are_set_for_each_process(name: str) -> None:
    specs = services("sluice.trainer.torch_threads=3", "sluice.rollout.torch_threads=2")
    assert specs[name].environment["OMP_NUM_THREADS"] == {"trainer": "3", "rollout-0": "2"}[name]


def test_ports_that_are_0_become_free_ones_that_differ_and_others_stay() -> None:
    chosen = with_ports(config("sluice.trainer.endpoint.port=0")).sluice
    assert 0 not in (chosen.trainer.endpoint.port, chosen.reward.endpoint.port)
    assert chosen.trainer.endpoint.port != chosen.reward.endpoint.port
    kept = with_ports(config("sluice.reward.endpoint.port=7001")).sluice
    assert peer_address(kept.reward.endpoint, "reward") == "127.0.0.1:7001"


def unknown(*_: object, **__: object) -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_hosts_address_is_that_of_the_network_that_leads_to_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"trainer cannot be reached"):
        own_address("trainer")


def test_a_peer_whose_name_is_known_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([unknown, unknown, socket.getaddrinfo])
    monkeypatch.setattr(service_spec, "_RETRY_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: next(answers)(*a, **k))
    assert own_address("127.0.0.1", 60.0) == "127.0.0.1"
    assert list(answers) == []


@pytest.mark.parametrize(
    ("name", "number"),
    [("rollout-7", 7), ("rollout-", None), ("rollout-x", None), ("trainer-1", None)],
)
def test_only_replicas_have_a_replicas_number(name: str, number: int | None) -> None:
    assert replica_number(name) == number
