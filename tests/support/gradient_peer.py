"""One trainer rank that writes a model's gradients of `layer_parity`'s loss, whole.

The only argument is a JSON object: FSDP's keys of a layout, and `Pass`es to make in it, one after
the other. Ranks take prompts of their own, unequal rows; the last has none, if there are several.
Of each pass rank 0 writes the gradients to a file, and each rank answers with a line of JSON: the
gradients' norm, and how many of the model's elements it holds.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.learner.batch.micro_batch import MicroBatch, build_micro_batch
from services.trainer.learner.model.forward import EntropyUse, token_outputs
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.lora import add_adapters, begin_expert_adapters
from services.trainer.learner.model.optimizer import ShardedGradients
from services.trainer.learner.model.sharding import EvenPasses
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, share_model
from services.trainer.learner.ranks import DataParallel, TorchDistributed
from sluice.algorithm.packing import plan_micro_batches
from sluice.config.derived import adapts
from sluice.config.parallel_layout import layout_of
from sluice.config.schema.actor import ActorFsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.select import select_device
from tests.support.layer_parity import TEMPERATURE, parity_rows, weighed

MOST_TOKENS = 64
TIMEOUT_S = 60.0
_CPU = torch.device("cpu")


class Pass(msgspec.Struct):
    """A model's folder, the file of its gradients, and the folder of an adapter, which is trained
    instead of the model.
    """

    model: str
    file: str
    recomputes: bool = False
    adapter: str | None = None


class GradientsAsked(msgspec.Struct):
    """Keys of `ActorFsdpConfig`, and what to do with them."""

    layout: dict[str, int]
    passes: list[Pass]


class PassFound(msgspec.Struct):
    """The norm of all gradients, and the model's elements that this rank holds."""

    norm: float
    held: int


def _micro_batches(parallel: DataParallel) -> list[MicroBatch]:
    takers = max(1, parallel.data_size - 1)
    rows = [row for row in parity_rows() if row.group % takers == parallel.data_rank]
    plans = plan_micro_batches([row.size for row in rows], range(len(rows)), rows_per_micro=3)
    built = [
        build_micro_batch(rows, plan, _CPU, share=parallel.share, pad_to=parallel.token_multiple)
        for plan in plans
    ]
    return [one for one in built if one is not None]


def run(one: Pass, sharding: ActorFsdpConfig, parallel: TorchDistributed) -> PassFound:
    settings = ModelConfig(
        path=one.model,
        enable_gradient_checkpointing=one.recomputes,
        lora_adapter_path=one.adapter,
    )
    loaded = load_policy(settings, sharding, MOST_TOKENS, is_sharded=True)
    if adapts(settings):
        add_adapters(loaded.model, settings, torch.float32)
    shards = share_model(loaded, sharding, parallel, key=ACTOR_SHARDING, device=_CPU)
    assert shards is not None
    begin_expert_adapters(loaded.model)

    def forward(micro_batch: MicroBatch) -> Tensor:
        found = token_outputs(
            loaded.model, micro_batch, temperature=TEMPERATURE, entropy=EntropyUse.BONUS
        )
        return weighed(found.logprobs, micro_batch, found.entropy)

    passes = EvenPasses(shards, parallel, forward, _CPU)
    micro_batches = _micro_batches(parallel)
    passes.begin(len(micro_batches))
    for micro_batch in micro_batches:
        loss = forward(micro_batch)
        passes.before_backward()
        loss.backward()
    passes.end_step()
    trained = {name: p for name, p in shards.parameters.items() if p.requires_grad}
    norm = ShardedGradients(list(trained.values()), parallel).norm()
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    whole = {n: g.full_tensor() for n, g in gradients.items() if isinstance(g, DTensor)}
    assert whole.keys() == gradients.keys()
    if parallel.rank == 0:
        save_file(whole, Path(one.file))
    held = sum(p.to_local().numel() for p in shards.parameters.values() if isinstance(p, DTensor))
    return PassFound(norm, held)


def main() -> int:
    torch.set_num_threads(1)
    # Whole gradients of several dimensions of a mesh take several collectives, each with a warning.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    asked = msgspec.json.decode(sys.argv[1], type=GradientsAsked)
    parallel = TorchDistributed(select_device("cpu"), TIMEOUT_S)
    sharding = msgspec.convert({"dtype": "float32", **asked.layout}, ActorFsdpConfig)
    parallel.divide(layout_of(sharding, parallel.world_size))
    for one in asked.passes:
        found = run(one, sharding, parallel)
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
