"""One rank of a pipeline that notes when each pass of its stage begins and ends.

The only argument is `StageAsked` as JSON. Each pass computes, and then waits until it took as long
as was asked: cores that stages share would otherwise lengthen the time line. A forward pass of the
last stage includes its loss. The answer is a line of JSON for each number of micro-batches: a list
of `TimedPass`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor

from services.trainer.learner.model.forward import TokenPass
from services.trainer.learner.model.passes import Passes, TokenPasses
from services.trainer.learner.ranks import TorchDistributed
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.parallel_layout import layout_of
from sluice.config.schema.actor import ActorFsdpConfig, TransformerOverrides
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.select import select_device
from tests.support.gradient_peer import CPU, TIMEOUT_S, divided
from tests.support.layer_parity import TEMPERATURE, pack, parity_rows


class StageAsked(msgspec.Struct, frozen=True):
    """A model's folder, seconds of a pass, and numbers of micro-batches."""

    model: str
    forward_s: float
    backward_s: float
    counts: Sequence[int]


class TimedPass(msgspec.Struct, frozen=True):
    """A pass over a micro-batch, counted from 0; seconds of the machine's monotonic clock."""

    micro_batch: int
    is_backward: bool
    began_s: float
    ended_s: float


class _Clock:
    """Lets each pass take its time, and notes it."""

    def __init__(self, asked: StageAsked) -> None:
        self.passes: list[TimedPass] = []
        for name, min_s in (("_forward", asked.forward_s), ("_backward", asked.backward_s)):
            timed = self._timed(getattr(Passes, name), name == "_backward", min_s)
            mock.patch.object(Passes, name, timed).start()

    def _timed(
        self, function: Callable[..., Any], is_backward: bool, min_s: float
    ) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:  # noqa: ANN401 - either pass's
            began_s = time.monotonic()
            found = function(*arguments)
            time.sleep(max(0.0, began_s + min_s - time.monotonic()))
            number = sum(one.is_backward == is_backward for one in self.passes)
            self.passes.append(TimedPass(number, is_backward, began_s, time.monotonic()))
            return found

        return timed


def _loss(_number: int, outputs: TokenStatistics) -> Tensor:
    return outputs.logprobs.sum()


def main() -> int:
    """Answer with a line of JSON for each number of micro-batches."""
    torch.set_num_threads(1)
    asked = msgspec.json.decode(sys.argv[1], type=StageAsked)
    parallel = TorchDistributed(select_device("cpu"), TIMEOUT_S)
    sharding = ActorFsdpConfig(dtype="float32", pipeline_parallel_size=parallel.world_size)
    parallel.divide(layout_of(sharding, parallel.world_size))
    model = ModelConfig(path=asked.model)
    loaded, shards = divided(model, sharding, TransformerOverrides(), parallel)
    clock = _Clock(asked)
    one = TokenPass(pack(parity_rows()[:4]), TEMPERATURE)
    passes = TokenPasses(loaded.model, shards, parallel, CPU, loaded.stage)
    for number, count in enumerate((1, *asked.counts)):
        clock.passes.clear()
        passes.begin(count)
        passes.train([one] * count, _loss)
        if number > 0:  # the first one of all prepares a lot
            sys.stdout.write(msgspec.json.encode(clock.passes).decode() + "\n")
            sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
