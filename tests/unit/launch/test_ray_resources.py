"""How an actor asks Ray for its resources, with a stand-in that refuses what Ray refuses."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sluice.launch.cluster.placement import PlacedProcess, PlacementPlan
from sluice.launch.cluster.ray_cluster import RayCluster

BY_OPTION = {"CPU", "GPU", "memory", "object_store_memory"}


class StandIn:
    """Of Ray: takes an actor's options."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def remote(self, _: type) -> StandIn:
        return self

    def options(self, **given: Any) -> SimpleNamespace:
        if refused := BY_OPTION & set(given["resources"]):
            raise ValueError(f"The resources dictionary must not contain the key {refused}")
        self.asked.append(given)
        return SimpleNamespace(remote=lambda: "an actor")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in, strategies = StandIn(), ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = SimpleNamespace  # type: ignore[attr-defined]
    main, util = ModuleType("ray"), ModuleType("ray.util")
    main.remote = stand_in.remote  # type: ignore[attr-defined]
    util.placement_group = lambda bundles, **_: bundles  # type: ignore[attr-defined]
    for module in (main, util, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return stand_in


def test_ray_is_asked_for_cpus_gpus_and_memory_by_options_of_their_own(ray: StandIn) -> None:
    wanted = {"CPU": 2.0, "GPU": 1.0, "memory": 64e9, "NPU": 8.0, "big": 1.0}
    plan = PlacementPlan(
        "trainer", "trainer", (wanted,), "PACK", (PlacedProcess("trainer", 0, wanted),)
    )
    RayCluster().reserve(plan)
    (asked,) = ray.asked
    assert (asked["num_cpus"], asked["num_gpus"], asked["memory"]) == (2.0, 1.0, 64e9)
    assert asked["resources"] == {"NPU": 8.0, "big": 1.0}


def test_without_memory_ray_is_asked_for_none(ray: StandIn) -> None:
    plan = PlacementPlan(
        "reward", "reward", ({"CPU": 1.0},), "PACK", (PlacedProcess("reward", 0, {"CPU": 1.0}),)
    )
    RayCluster().reserve(plan)
    assert ray.asked[0]["memory"] is None
