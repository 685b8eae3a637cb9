"""One trainer rank that counts the bytes of its passes: a real one, or one as `sluice plan` has it.

``python -m tests.support.counted_rank`` reads `DryRunRequest` as JSON from its first argument. With
``fake`` as the second it is alone; otherwise it meets the other ranks of its environment, and
counts the whole model, or its own stage of it.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from services.trainer.dry_run.__main__ import dry_run
from services.trainer.dry_run.measure import measure_passes
from services.trainer.learner.ranks import TorchDistributed
from sluice.config.parallel_layout import trainer_layout
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.plan.dry_run import DryRunRequest, PassBytes

_MEETING_S = 90.0


def count_passes(asked: DryRunRequest, config: RunConfig, parallel: TorchDistributed) -> PassBytes:
    """Divide the ranks, and count this one's passes. Collective."""
    layout = trainer_layout(config, parallel.world_size)
    parallel.divide(layout)
    # Meshes hold numbers of ranks; a plan has made them before it counts.
    parallel.shard_mesh(layout.shard)
    parallel.expert_mesh(layout.shard)
    return measure_passes(config, asked.model, parallel)


def main() -> int:
    asked = msgspec.json.decode(sys.argv[1], type=DryRunRequest)
    torch.set_num_threads(1)
    if sys.argv[2:] == ["fake"]:
        found = msgspec.json.encode(dry_run(asked))
    else:
        parallel = TorchDistributed(select_device("cpu"), _MEETING_S)
        config = msgspec.convert(asked.config, RunConfig)
        found = msgspec.json.encode(count_passes(asked, config, parallel))
        parallel.close()
    sys.stdout.write(found.decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
