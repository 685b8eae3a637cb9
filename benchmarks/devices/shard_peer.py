"""One of several trainer ranks that share a model; rank 0 publishes it to a replica's process.

Answers with a line of JSON: `held`, the bytes of the weights that the rank sends; `more`, the most
host memory beside its shards; `sent`, on rank 0 the bytes that each rank sent of the first version.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from services.trainer.fleet.members import Fleet
from services.trainer.fleet.publisher import PublishReport, WeightPublisher
from services.trainer.learner.frozen_weights import FrozenWeights, connected_ranks
from services.trainer.learner.learner import Learner
from services.trainer.learner.rank_command import RankLeader, follow
from services.trainer.learner.ranks import TorchDistributed
from sluice.device.cpu import CpuDevice
from sluice.device.select import select_device
from sluice.weights.rank_sender import OtherRank
from sluice.weights.sender import WeightSender
from tests.support.taken_samples import MadeSamples
from tests.support.tiny_policy import make_batch, make_config
from tests.support.weight_fault_fleet import Replica
from tests.support.weight_fleet import peer_processes

_TIMEOUT_S, _BUCKET_BYTES, _GROUPS, _KIB = 60.0, 16 << 20, 4, 1024
_VERSIONS = (1, 2, 3)


def _memory(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * _KIB
    raise AssertionError(key)


def _publish(
    leader: RankLeader, frozen: FrozenWeights, others: Sequence[OtherRank]
) -> list[PublishReport]:
    fleet = Fleet("layout", 1e9)

    async def publish_all(replica: Replica) -> list[PublishReport]:
        publisher = WeightPublisher(
            fleet,
            frozen.snapshots,
            frozen.tensors,
            make_sender=lambda: WeightSender(
                device=CpuDevice(),
                bucket_bytes=_BUCKET_BYTES,
                timeout_s=_TIMEOUT_S,
                holdings=frozen.holdings,
                others=others,
            ),
            connect=lambda _: replica,  # type: ignore[arg-type,return-value]
            timeout_s=_TIMEOUT_S,
            probe_timeout_s=_TIMEOUT_S,
        )
        reports = []
        for version in _VERSIONS:
            await asyncio.to_thread(leader.freeze, version)
            reports.append(await publisher.publish(version))
        await publisher.close()
        return reports

    with peer_processes(["replica"], forked=False) as (peer,):
        replica = Replica(peer)
        fleet.register(replica.info, "layout", 0.0)
        return asyncio.run(publish_all(replica))


def main() -> int:
    """Answer with a line of JSON."""
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    parallel = TorchDistributed(select_device("cpu"), _TIMEOUT_S)
    config = make_config(Path(arguments["model"]), _GROUPS, fsdp_config={"dtype": "float32"})
    learner = Learner(config, parallel, total_steps=10)
    samples = MadeSamples(lambda _: make_batch(_GROUPS, seed=1))
    gc.collect()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    with ExitStack() as stack:
        frozen = FrozenWeights(learner, parallel.rank, torch.bfloat16, _TIMEOUT_S)
        ranks = connected_ranks(
            frozen, parallel, device=CpuDevice(), timeout_s=_TIMEOUT_S, keeps_base=True
        )
        others = stack.enter_context(ranks)
        answer: dict[str, Any] = {"held": frozen.snapshots.plan.total_bytes}
        if parallel.rank == 0:
            leader = RankLeader(learner, parallel, _TIMEOUT_S, samples, frozen)
            reports = _publish(leader, frozen, others)
            answer["sent"] = reports[0].rank_bytes
            leader.stop()
        else:
            follow(learner, parallel, samples, frozen)
        answer["more"] = _memory("VmHWM") - before
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
