"""Ranks in real processes stream and save tensors that a mesh cuts in any way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.launch.service_spec import free_ports
from tests.support.preloaded import PreloadedProcess
from tests.support.stream_peer import SHAPES

ANSWER_S = 600.0
BUCKET_BYTES = 512

# Letters are placements over the mesh's dimensions.
LAYOUTS: dict[str, tuple[list[int], dict[str, str]]] = {
    "one rank": ([1], dict.fromkeys(SHAPES, "-")),
    "four shards": ([4], {name: "0" for name in SHAPES if SHAPES[name]} | {"scalar": "-"}),
    "two copies of two shards": (
        [2, 2],
        {name: "r0" for name in SHAPES if SHAPES[name]} | {"scalar": "-"},
    ),
    "experts over two dimensions": (
        [2, 2],
        {name: "r0" for name in SHAPES if SHAPES[name]} | {"experts": "00", "scalar": "-"},
    ),
    "experts cut across": (
        [2, 2],
        {"experts": "01", "uneven": "10", "long": "01", "one row": "r1", "vector": "00"}
        | {"scalar": "-", "empty": "r0"},
    ),
}


def run(layout: str, folder: Path, *, reads: bool = False) -> list[Any]:
    """Run all ranks of a layout; return their answers."""
    shape, cuts = LAYOUTS[layout]
    world_size = 1
    for size in shape:
        world_size *= size
    (port,) = free_ports(["127.0.0.1"])
    cuts = {name: cuts[name] for name in SHAPES}
    arguments = {"mesh": shape, "cuts": cuts, "bucket": BUCKET_BYTES, "folder": str(folder)}
    ranks = [
        PreloadedProcess(
            "tests.support.stream_peer",
            [json.dumps(arguments | {"reads": reads})],
            {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
        )
        for rank in range(world_size)
    ]
    try:
        answers = [json.loads(rank.stdout.readline()) for rank in ranks]
        assert [rank.wait(ANSWER_S) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.close()
    return answers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_layout_streams_and_saves_others_read_bit_for_bit(
    layout: str, tmp_path: Path
) -> None:
    first, *others = run(layout, tmp_path)
    assert first["equal"] == dict.fromkeys(SHAPES, True)
    assert all(not one["equal"] for one in others)
    # A bucket, pieces that do not lie in one stretch of it, and what a thread of gloo still holds
    # for a moment after its collective ended. The longest tensor is eight buckets.
    assert all(one["most"] <= 3 * BUCKET_BYTES for one in (first, *others))
    names = list(LAYOUTS)
    following = names[(names.index(layout) + 1) % len(names)]
    for other in {names[0], following} - {layout}:
        for answer in run(other, tmp_path, reads=True):
            assert answer == dict.fromkeys(SHAPES, True), other
