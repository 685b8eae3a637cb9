"""What the benchmark of placements says of processes that report their devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.devices.launches import Launch, misplaced, read_launch, split_line

LINE = "devices: 3 train, 4 generate in 2 replicas of 2 (sluice.placement=auto, half each)"
LAUNCH = Launch(Path("any.overrides"), "any", "NPU", 1, 7)


def report(kind: str, devices: str, rank: int | str = "", **other: str) -> dict[str, str]:
    return {
        "kind": kind,
        "node": "7",
        "ASCEND_RT_VISIBLE_DEVICES": devices,
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "3" if kind == "trainer" else "",
        **other,
    }


def good() -> list[dict[str, str]]:
    return [
        report("reward", ""),
        *(report("trainer", str(rank), rank) for rank in range(3)),
        report("rollout", "3,5"),
        report("rollout", "4,6"),
    ]


def test_processes_with_the_devices_of_their_split_are_placed() -> None:
    assert misplaced(LAUNCH, LINE, good()) == []


@pytest.mark.parametrize(
    ("place", "other", "said"),
    [
        (5, report("rollout", "4"), "processes with so many devices"),
        (5, report("rollout", "3,6"), "6 devices are used, of one by 2 processes"),
        (5, report("rollout", "4,7"), "rollout has ASCEND_RT_VISIBLE_DEVICES=4,7"),
        (0, report("reward", "", CUDA_VISIBLE_DEVICES="0"), "reward has"),
        (2, report("trainer", "1", 3), "trainer ranks are [0, 2, 3]"),
        (2, report("trainer", "1", 1, LOCAL_RANK="0"), "a node has the ranks and local ranks"),
        (2, report("trainer", "1", 1, WORLD_SIZE="4"), "trainer ranks are [0, 1, 2], wanted 3"),
    ],
)
def test_a_process_with_other_devices_or_numbers_is_misplaced(
    place: int, other: dict[str, str], said: str
) -> None:
    seen = good()
    seen[place] = other
    assert said in "; ".join(misplaced(LAUNCH, LINE, seen))


def test_a_launch_without_a_line_is_not_placed() -> None:
    assert misplaced(LAUNCH, "", good()) == ["no split was said: ''"]


def test_replicas_of_one_device_have_no_size_in_the_line() -> None:
    found = split_line("x\ndevices: 1 trains, 1 generates in 1 replica (as its keys name them)\n")
    assert found is not None
    assert found[1:] == (1, 1, 1)


def test_nodes_and_kind_are_those_of_the_launch() -> None:
    found = read_launch("dapo-qwen3-32b-fsdp2-npu", {"devices": 64, "model": "Qwen3-32B"})
    assert (found.kind, found.nodes, found.per_node) == ("NPU", 4, 16)
