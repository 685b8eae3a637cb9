"""One of several ranks whose tensors are cut in any way over a mesh; they stream and save them.

Arguments, as JSON: the mesh's shape, placements by tensor (``0``: that dimension is cut, ``r``:
copies), the size of a bucket, and a folder. Every rank answers with one line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from services.trainer.learner.ranks import TorchDistributed
from services.trainer.learner.sharded_state import StateFiles, keep_step, write_state
from services.trainer.learner.tensor_layouts import (
    TensorLayouts,
    exchange_layouts,
    local_part,
    local_region,
    region,
)
from services.trainer.learner.weight_stream import cut_buckets, exchange_rows
from sluice.device.select import select_device
from tests.support.made_bytes import MadeBytes

SHAPES: dict[str, tuple[int, ...]] = {
    "experts": (8, 6, 5),
    "uneven": (7, 3),
    "long": (64, 16),
    "one row": (1, 4),
    "vector": (9,),
    "scalar": (),
    "empty": (0, 3),
}


def whole_tensor(name: str, salt: float = 0.0) -> torch.Tensor:
    """The same on every rank."""
    shape = SHAPES[name]
    size = torch.Size(shape).numel()
    return torch.arange(size, dtype=torch.float32).reshape(shape) + 1000 * len(name) + salt


def sharded(mesh: DeviceMesh, letters: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; ``-``: every rank holds it whole."""
    if letters == "-":
        return whole.clone()
    placements: list[Placement] = [Replicate() if c == "r" else Shard(int(c)) for c in letters]
    empty = DTensor.from_local(
        torch.empty(0), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    offset, shape = local_region(empty)
    local = whole[region(offset, shape)].clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def streamed(
    tensors: dict[str, torch.Tensor], places: TensorLayouts, parallel: TorchDistributed, bucket: int
) -> dict[str, object]:
    """Bring them to rank 0 by buckets; say what arrived and what it took."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    found: dict[str, list[torch.Tensor]] = {}
    with MadeBytes() as live:
        for rows in cut_buckets(places, places, bucket):
            values = exchange_rows([(0, one) for one in rows], parts, places, parallel, "streaming")
            for one in rows[: len(values)]:
                found.setdefault(one.name, []).append(copied(values.pop(0)))
    equal = {
        name: torch.equal(torch.cat(rows).reshape(SHAPES[name]), whole_tensor(name))
        for name, rows in found.items()
    }
    return {"equal": equal, "most": live.most}


def copied(rows: torch.Tensor) -> torch.Tensor:
    """A copy that is not counted: a reader copies into memory of its own."""
    with _disable_current_modes():
        return rows.clone()


def main() -> int:
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    parallel = TorchDistributed(select_device("cpu"), 300.0)
    mesh = DeviceMesh("cpu", torch.arange(parallel.world_size).view(arguments["mesh"]))
    folder = Path(arguments["folder"])
    cuts = arguments["cuts"]
    tensors = {name: sharded(mesh, cut, whole_tensor(name)) for name, cut in cuts.items()}
    places = exchange_layouts(tensors, parallel)
    answer: dict[str, object] = {}
    if arguments["reads"]:
        # What other ranks saved, in this layout.
        files = StateFiles(folder, "state")
        for name, tensor in tensors.items():
            part = local_part(tensor)
            expected = part.clone()
            part.fill_(torch.nan)
            files.fill(part, name, local_region(tensor)[0])
            answer[name] = torch.equal(part, expected)
    else:
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        answer = streamed(tensors, places, parallel, arguments["bucket"])
        keep_step(write_state(folder, "state", parts, places, parallel), parallel, "saving")
    gc.collect()
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
