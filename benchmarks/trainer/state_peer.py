"""One trainer rank that counts what it reads at its start, and times asynchronous saves."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from services.trainer.dry_run.live_bytes import LiveBytes
from services.trainer.learner.learner import Learner
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.policy_snapshots import policy_snapshots
from services.trainer.learner.ranks import TorchDistributed
from services.trainer.learner.tensor_layouts import local_part
from services.trainer.learner.weight_stream import BUCKET_BYTES
from sluice.device.select import select_device
from tests.support.tiny_policy import make_batch, make_config

_SAVES, _GROUPS, _TIMEOUT_S = 3, 4, 300.0


class _CountedSlice:
    """A tensor of a file whose read bytes are added to `read`."""

    read = 0

    def __init__(self, opened: Any) -> None:  # noqa: ANN401 - safetensors has no types
        self._opened = opened

    def get_shape(self) -> list[int]:
        return list(self._opened.get_shape())

    def get_dtype(self) -> str:
        return str(self._opened.get_dtype())

    def __getitem__(self, index: object) -> Tensor:
        found: Tensor = self._opened[index]
        _CountedSlice.read += found.nbytes
        return found


def _count_reads() -> None:
    original = WeightFiles._slice

    def counted(files: WeightFiles, name: str) -> _CountedSlice:
        return _CountedSlice(original(files, name))

    mock.patch.object(WeightFiles, "_slice", counted).start()


def _blocked_share(learner: Learner, folder: Path) -> float:
    """Return the seconds until training may continue over those of the whole save."""
    began_s = time.monotonic()
    write = learner.begin_save(folder)
    blocked_s = time.monotonic() - began_s
    write()
    return blocked_s / (time.monotonic() - began_s)


def main() -> int:
    """Answer with a line of JSON."""
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    _count_reads()
    parallel = TorchDistributed(select_device("cpu"), _TIMEOUT_S)
    config = make_config(
        Path(arguments["model"]),
        _GROUPS,
        checkpoint={"async_save": True},
        ppo_micro_batch_size_per_gpu=4,
    )
    learner = Learner(config, parallel, total_steps=10)
    read = _CountedSlice.read
    own = sum(local_part(one).nbytes for _, one in learner.named_weights())
    learner.train_step(make_batch(_GROUPS, seed=1), 1)
    blocked = []
    for number in range(_SAVES):
        parallel.all_gather([0.0], "starting a save together")
        folder = Path(f"{arguments['saved']}-{number}") / "actor"
        blocked.append(_blocked_share(learner, folder))
    snapshots = policy_snapshots(config, learner, parallel)
    with LiveBytes() as live:
        snapshots.freeze(1)
    answer = {"read": read, "own": own, "blocked": blocked}
    sys.stdout.write(json.dumps(answer | {"beside_buckets": live.peak / BUCKET_BYTES}) + "\n")
    sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
