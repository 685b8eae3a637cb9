"""One trainer rank that counts the bytes of its passes, and of real steps with all stages at once.

The only argument is `DryRunRequest` as JSON, with the whole model. The answers are what
`counted_rank` says of real ranks, and the peak of a step's passes in bytes, moments not there.
"""

from __future__ import annotations

import sys

import msgspec
import torch
from torch import Tensor

from services.trainer.dry_run.live_bytes import LiveBytes
from services.trainer.dry_run.measure import _Rank, balanced_routing
from services.trainer.learner.model.forward import TokenPass
from services.trainer.learner.model.passes import TokenPasses
from services.trainer.learner.ranks import TorchDistributed
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.plan.dry_run import DryRunRequest
from tests.support.counted_rank import count_passes

_MEETING_S = 90.0


def _loss(_number: int, outputs: TokenStatistics) -> Tensor:
    return outputs.logprobs.sum()


def _peak(asked: DryRunRequest, config: RunConfig, parallel: TorchDistributed) -> int:
    layout = parallel.layout
    with LiveBytes() as count:
        rank = _Rank(config, asked.model, parallel, count)
        passes = TokenPasses(rank._model, rank._shards, parallel, torch.device("cpu"), rank._stage)
        tokens = rank._micro_batch.input_ids.shape[1]
        for number in (1, layout.pipeline + 1):  # the first one prepares
            count.reset()
            passes.begin(number)
            asked_passes = [
                TokenPass(
                    rank._micro_batch,
                    config.actor_rollout_ref.rollout.temperature,
                    rank._entropy,
                    routing=balanced_routing(rank._model, tokens),
                )
                for _ in range(number)
            ]
            passes.train(asked_passes, _loss)
            peak = count.peak
            rank._optimizer.gradients.zero()
    return peak


def main() -> int:
    torch.set_num_threads(1)
    asked = msgspec.json.decode(sys.argv[1], type=DryRunRequest)
    parallel = TorchDistributed(select_device("cpu"), _MEETING_S)
    config = msgspec.convert(asked.config, RunConfig)
    alone = count_passes(asked, config, parallel)
    peak = _peak(asked, config, parallel)
    parallel.close()
    sys.stdout.write(f"{msgspec.json.encode(alone).decode()}\n{peak}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
