"""One trainer rank that counts the bytes of its passes: a real one, or one as `sluice plan` has it.

``python -m tests.support.counted_rank`` reads `DryRunAsked` as JSON from its first argument. With
``fake`` as the second it is alone; otherwise it meets the other ranks of its environment.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from services.trainer.dry_run.__main__ import dry_run, with_layers
from services.trainer.dry_run.measure import counted
from services.trainer.learner.ranks import TorchDistributed
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.plan.dry_run import DryRunAsked

_MEETING_S = 90.0


def main() -> int:
    asked = msgspec.json.decode(sys.argv[1], type=DryRunAsked)
    torch.set_num_threads(1)
    if sys.argv[2:] == ["fake"]:
        found = dry_run(asked)
    else:
        parallel = TorchDistributed(select_device("cpu"), _MEETING_S)
        config = msgspec.convert(asked.config, RunConfig)
        stages = config.actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size
        found = [
            counted(config, with_layers(asked.model, n * stages), parallel) for n in asked.layers
        ]
        parallel.close()
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
