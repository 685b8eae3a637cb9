"""One trainer rank that writes a model's gradients of `layer_parity`'s loss, whole.

The only argument is a JSON object: FSDP's keys of a layout, and `Pass`es to make in it, one after
the other. Ranks take prompts of their own, unequal rows; the last has none, if there are several.
Of each pass the first rank of each stage writes the gradients to a file, and each rank answers with
a line of JSON: the gradients' norm, how many of the model's elements it holds, and whether a pass
without gradients of its first micro-batches gave the same logprobs.
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
from services.trainer.learner.model.forward import EntropyUse, TokenPass
from services.trainer.learner.model.loading import LoadedModel, load_policy
from services.trainer.learner.model.lora import add_adapters, init_expert_adapters
from services.trainer.learner.model.optimizer import ShardedGradients
from services.trainer.learner.model.passes import TokenPasses
from services.trainer.learner.model.sharding import Shards
from services.trainer.learner.model.stages import keep_stage, own_stage, tied_weight
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, share_model
from services.trainer.learner.ranks import ParallelContext, TorchDistributed
from sluice.algorithm.packing import plan_micro_batches
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.derived import uses_adapters
from sluice.config.parallel_layout import layout_of
from sluice.config.schema.actor import ActorFsdpConfig, TransformerOverrides
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.select import select_device
from sluice.vision.vision_shape import reads_images
from tests.support.image_parity import image_rows
from tests.support.layer_parity import TEMPERATURE, parity_rows, weighed

MAX_TOKENS = 64
ROWS_A_PASS = 5
"""One rank's 24 rows are five micro-batches, which four stages take in turn."""
IMAGE_ROWS_A_PASS = 3
"""Fewer: the errors of longer sums in float32 are near the bound."""
ALSO_ALONE = 2
"""Micro-batches that are passed without gradients too."""
TIMEOUT_S = 240.0
CPU = torch.device("cpu")


class Pass(msgspec.Struct):
    """A model's folder, the file of its gradients, and the folder of an adapter, which is trained
    instead of the model.
    """

    model: str
    file: str
    recomputes: bool = False
    adapter: str | None = None


class GradientsAsked(msgspec.Struct):
    """Keys of `ActorFsdpConfig`, what to do with them, and keys of `TransformerOverrides`."""

    layout: dict[str, int]
    passes: list[Pass]
    cut: dict[str, int] = {}


class PassFound(msgspec.Struct):
    """The norm of all gradients, the model's elements that this rank holds, and whether a pass
    without gradients gave the same bits.
    """

    norm: float
    held: int
    is_equal: bool


def _micro_batches(model: Path, parallel: ParallelContext) -> list[MicroBatch]:
    takers = max(1, parallel.layout.data_ranks - 1)
    if reads_images(model):
        (every, images), rows_a_pass = image_rows(model), IMAGE_ROWS_A_PASS
    else:
        every, images, rows_a_pass = parity_rows(), {}, ROWS_A_PASS
    rows = [row for row in every if row.group % takers == parallel.data_rank]
    plans = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=rows_a_pass
    )
    built = [
        build_micro_batch(
            rows,
            plan,
            CPU,
            images,
            parallel.share,
            parallel.token_multiple,
            image_ranks=parallel.image_ranks,
        )
        for plan in plans
    ]
    return [one for one in built if one is not None]


def divided(
    settings: ModelConfig,
    sharding: ActorFsdpConfig,
    cut: TransformerOverrides,
    parallel: TorchDistributed,
) -> tuple[LoadedModel, Shards]:
    """This rank's part of a model, in float32, its layout's groups formed."""
    loaded = load_policy(settings, sharding, MAX_TOKENS, is_sharded=True)
    if uses_adapters(settings):
        add_adapters(loaded.model, settings, torch.float32)
    loaded = keep_stage(loaded, own_stage(loaded.model, sharding, cut, parallel))
    shards = share_model(loaded, sharding, parallel, key=ACTOR_SHARDING, device=CPU)
    assert shards is not None
    init_expert_adapters(loaded.model)
    return loaded, shards


def run(
    one: Pass, sharding: ActorFsdpConfig, cut: TransformerOverrides, parallel: TorchDistributed
) -> PassFound:
    settings = ModelConfig(
        path=one.model,
        enable_gradient_checkpointing=one.recomputes,
        lora_adapter_path=one.adapter,
    )
    loaded, shards = divided(settings, sharding, cut, parallel)

    micro_batches = _micro_batches(Path(one.model), parallel)
    asked = [TokenPass(one, TEMPERATURE, EntropyUse.BONUS) for one in micro_batches]
    passes = TokenPasses(loaded.model, shards, parallel, CPU, loaded.stage)
    alone: dict[int, Tensor] = {}
    is_equal: list[bool] = []

    def read(number: int, outputs: TokenStatistics) -> None:
        alone[number] = outputs.logprobs

    def loss(number: int, outputs: TokenStatistics) -> Tensor:
        if number in alone:
            is_equal.append(torch.equal(outputs.logprobs, alone[number]))
        return weighed(outputs.logprobs, micro_batches[number], outputs.entropy)

    first = asked[:ALSO_ALONE]
    passes.begin(len(first))
    passes.forward(first, read)
    passes.begin(len(asked))
    passes.train(asked, loss)
    trained = {name: p for name, p in shards.parameters.items() if p.requires_grad}
    tied = tied_weight(loaded.model, trained, loaded.stage)
    summed = ShardedGradients(list(trained.values()), parallel, tied)
    summed.complete()
    norm = summed.norm()
    gradients = {name: parameter.grad for name, parameter in trained.items()}
    whole = {n: g.full_tensor() for n, g in gradients.items() if isinstance(g, DTensor)}
    assert whole.keys() == gradients.keys()
    if parallel.rank % parallel.stage_size == 0:
        save_file(whole, Path(f"{one.file}-{parallel.rank // parallel.stage_size}"))
    held = sum(p.to_local().numel() for p in shards.parameters.values() if isinstance(p, DTensor))
    return PassFound(norm, held, all(is_equal))


def main() -> int:
    torch.set_num_threads(1)
    # Whole gradients of several dimensions of a mesh take several collectives, each with a warning.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    asked = msgspec.json.decode(sys.argv[1], type=GradientsAsked)
    parallel = TorchDistributed(select_device("cpu"), TIMEOUT_S)
    sharding = msgspec.convert({"dtype": "float32", **asked.layout}, ActorFsdpConfig)
    parallel.divide(layout_of(sharding, parallel.world_size))
    cut = msgspec.convert(asked.cut, TransformerOverrides)
    for one in asked.passes:
        found = run(one, sharding, cut, parallel)
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
