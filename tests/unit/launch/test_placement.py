"""What of a cluster each process takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.launch.cluster.placement import (
    NodeCapacity,
    PlacementPlan,
    accelerator,
    parse_demands,
    plans,
    replica_plan,
    shortage,
)
from sluice.launch.service_spec import placed_replica, placed_trainer, reward_service

NPUS = {"CPU": 64.0, "NPU": 16.0}
GPUS = {"CPU": 64.0, "GPU": 16.0}


def config(*overrides: str) -> RunConfig:
    return load_config(None, overrides)


def by_name(run: RunConfig, cluster: dict[str, float], *extra: str) -> dict[str, PlacementPlan]:
    return {plan.name: plan for plan in plans(run, cluster, parse_demands(extra))}


def test_reward_trainer_and_each_replica_are_groups_of_their_own() -> None:
    run = config("sluice.rollout.replicas=2", "trainer.n_gpus_per_node=2")
    found = by_name(run, {})
    assert list(found) == ["reward", "trainer", "rollout-0", "rollout-1"]
    assert [member.name for member in found["trainer"].members] == ["trainer", "trainer-1"]
    assert all(len(found[name].members) == 1 for name in ("reward", "rollout-0", "rollout-1"))


def test_every_process_of_a_run_has_a_place_and_no_place_is_without_one() -> None:
    run = config("sluice.rollout.replicas=3", "trainer.nnodes=2", "trainer.n_gpus_per_node=2")
    members = [member.name for plan in plans(run, {}, {}) for member in plan.members]
    file = Path("run.yaml")
    specs = (
        reward_service(run, file),
        *placed_trainer(run, file, "none", ("10.0.0.1", 29500)),
        *(placed_replica(run, file, number) for number in range(3)),
    )
    assert members == [spec.name for spec in specs]


def test_all_ranks_of_a_node_share_one_bundle_and_nodes_differ() -> None:
    run = config("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.device=cuda")
    plan = by_name(run, GPUS)["trainer"]
    assert plan.bundles == ({"CPU": 4.0, "GPU": 4.0},) * 2
    assert plan.strategy == "STRICT_SPREAD"
    assert [member.bundle for member in plan.members] == [0] * 4 + [1] * 4
    assert {tuple(member.resources.items()) for member in plan.members} == {
        (("CPU", 1.0), ("GPU", 1.0))
    }


def test_a_trainer_on_one_node_is_not_spread() -> None:
    assert by_name(config("trainer.n_gpus_per_node=4"), {})["trainer"].strategy == "STRICT_PACK"


def test_a_replica_takes_as_many_devices_as_its_engine_computes_on() -> None:
    wide = config(
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        "sluice.rollout.device=npu",
        "sluice.rollout.torch_threads=3",
    )
    assert replica_plan(wide, NPUS, {}, 7).bundles == ({"CPU": 3.0, "NPU": 8.0},)
    assert replica_plan(wide, NPUS, {}, 7).members[0].name == "rollout-7"


@pytest.mark.parametrize(
    ("device", "cluster", "wanted"),
    [
        (None, NPUS, "NPU"),
        ("auto", GPUS, "GPU"),
        (None, {**NPUS, **GPUS}, "NPU"),
        (None, {"CPU": 4.0}, None),
        ("cpu", NPUS, None),
        ("npu", {}, "NPU"),
        ("cuda", NPUS, "GPU"),
        ("cuda:1", {}, "GPU"),
    ],
)
def test_the_device_key_decides_the_resource_and_without_it_the_cluster(
    device: str | None, cluster: dict[str, float], wanted: str | None
) -> None:
    assert accelerator(device, cluster) == wanted


def test_further_resources_are_added_and_take_the_place_of_the_same_ones() -> None:
    run = config("trainer.n_gpus_per_node=2", "trainer.device=cpu", "sluice.rollout.device=npu")
    found = by_name(
        run, NPUS, "trainer=big:0.5", "rollout=NPU:2", "rollout=CPU:4", "reward=node:10.0.0.1:0.01"
    )
    assert found["trainer"].bundles == ({"CPU": 2.0, "big": 1.0},)
    assert found["rollout-0"].bundles == ({"CPU": 4.0, "NPU": 2.0},)
    assert found["reward"].bundles == ({"CPU": 1.0, "node:10.0.0.1": 0.01},)


def test_a_resource_of_0_is_not_asked_for() -> None:
    found = by_name(config("sluice.rollout.device=cpu"), {}, "rollout=CPU:0", "rollout=slot:1")
    assert found["rollout-0"].bundles == ({"slot": 1.0},)


@pytest.mark.parametrize(
    "text", ["rollout", "rollout=NPU", "rollout=:1", "actor=NPU:1", "rollout=NPU:x", "=NPU:1",
             "rollout=NPU:-1", "rollout=NPU:nan", "rollout=NPU:inf"]
)  # fmt: skip
def test_a_demand_that_is_written_otherwise_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="write SERVICE=RESOURCE:AMOUNT") as refused:
        parse_demands([text])
    assert repr(text) in str(refused.value)


@settings(deadline=None, max_examples=30)
@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    threads=st.integers(1, 4),
    extra=st.dictionaries(st.sampled_from(["slot", "CPU", "GPU"]), st.integers(1, 9), max_size=3),
)
def test_the_members_of_a_bundle_take_all_of_it_and_no_more(
    nodes: int, per_node: int, threads: int, extra: dict[str, int]
) -> None:
    run = config(
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={per_node}",
        "trainer.device=cuda",
        f"sluice.trainer.torch_threads={threads}",
    )
    demands = parse_demands(f"trainer={name}:{amount}" for name, amount in extra.items())
    for plan in plans(run, GPUS, demands):
        for index, bundle in enumerate(plan.bundles):
            taken: dict[str, float] = {}
            for member in plan.members:
                if member.bundle == index:
                    for name, amount in member.resources.items():
                        taken[name] = taken.get(name, 0.0) + amount
            assert taken == bundle


@pytest.mark.parametrize("kind", ["reward", "trainer", "rollout"])
def test_a_process_that_would_take_nothing_is_refused_with_the_option(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^--resources {kind}=CPU:0: nothing is left"):
        by_name(config(), {}, f"{kind}=CPU:0")


def test_what_a_process_takes_nothing_of_is_not_asked_for() -> None:
    reward = by_name(config(), {}, "reward=CPU:0", "reward=slot:1")["reward"]
    assert reward.bundles == ({"slot": 1.0},)


def test_a_group_without_capacity_is_reported_with_the_resource_that_each_node_lacks() -> None:
    plan = by_name(config("sluice.rollout.device=npu"), NPUS, "rollout=NPU:8")["rollout-0"]
    nodes = [
        NodeCapacity("10.0.0.1", {"CPU": 8.0}, {"CPU": 8.0}),
        NodeCapacity("10.0.0.2", {"CPU": 8.0, "NPU": 16.0}, {"CPU": 8.0, "NPU": 4.0}),
        NodeCapacity("10.0.0.3", {"CPU": 8.0, "NPU": 16.0}, {"NPU": 16.0}),
        NodeCapacity("10.0.0.4", {"CPU": 8.0, "NPU": 16.0}, {"CPU": 1.0, "NPU": 8.0}),
    ]
    assert shortage(plan, nodes) == (
        "rollout-0 takes CPU:1, NPU:8 on a node, and 1 of 4 nodes has capacity:\n"
        "  10.0.0.1: NPU: 8 wanted, 0 free of 0\n"
        "  10.0.0.2: NPU: 8 wanted, 4 free of 16\n"
        "  10.0.0.3: CPU: 1 wanted, 0 free of 8\n"
        "  10.0.0.4: has capacity"
    )


def test_a_trainer_that_needs_more_nodes_says_how_many() -> None:
    run = config("trainer.nnodes=2", "trainer.device=cuda")
    capacity = NodeCapacity("10.0.0.1", GPUS, GPUS)
    text = shortage(by_name(run, GPUS)["trainer"], [capacity])
    assert "on each of 2 nodes, and 1 of 1 nodes has capacity" in text
    assert "10.0.0.1: has capacity" in text


@pytest.mark.parametrize("name", ["object_store_memory", "bundle"])
def test_what_ray_keeps_for_itself_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Ray keeps {name} for itself"):
        parse_demands([f"trainer={name}:1e9"])


def test_memory_is_a_resource_of_each_process_in_bytes() -> None:
    run = config("trainer.n_gpus_per_node=2", "trainer.device=cpu")
    plan = by_name(run, {}, "trainer=memory:64e9")["trainer"]
    assert plan.bundles == ({"CPU": 2.0, "memory": 128e9},)
    assert plan.members[0].resources == {"CPU": 1.0, "memory": 64e9}
