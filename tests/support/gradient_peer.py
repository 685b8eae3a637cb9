"""One trainer rank that writes the policy's gradients of a fixed loss, whole, and their norm.

Every rank takes rows of its own; the last one has none, if there are several. Rank 0 writes the
gradients to a file; each rank answers with the norm, and how many of the model's elements it holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.trainer.learner.batch.micro_batch import MicroBatch, TrainingRow, build_micro_batch
from services.trainer.learner.model.forward import EntropyUse, check_packing, token_outputs
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.optimizer import ShardedGradients
from services.trainer.learner.model.sharding import EvenPasses
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, share_model
from services.trainer.learner.ranks import DataParallel, TorchDistributed
from sluice.algorithm.packing import plan_micro_batches
from sluice.config.schema.actor import ActorFsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.select import select_device
from tests.support.tiny_policy import VOCABULARY

LENGTHS = ((5, 9), (3, 4), (8, 13), (2, 1), (6, 7), (4, 11), (7, 2))
"""Tokens of each row's prompt and response."""
MOST_TOKENS = 64
TIMEOUT_S = 60.0


def make_rows() -> list[TrainingRow]:
    random = np.random.default_rng(3)
    rows = []
    for number, (prompt, response) in enumerate(LENGTHS):
        ids = random.integers(VOCABULARY, size=prompt + response).astype(np.uint32)
        logprobs = np.zeros(response, np.float32)
        rows.append(TrainingRow(number, number, ids[:prompt], ids[prompt:], logprobs))
    return rows


def loss_of(logprobs: Tensor, entropy: Tensor, labels: Tensor) -> Tensor:
    """Of response tokens, [N] each."""
    return (logprobs * (1.0 + 0.1 * (labels % 7)) + 0.1 * entropy).sum()


def _micro_batches(parallel: DataParallel) -> list[MicroBatch]:
    takers = max(1, parallel.data_size - 1)
    rows = [r for n, r in enumerate(make_rows()) if n % takers == parallel.data_rank]
    plans = plan_micro_batches([row.size for row in rows], range(len(rows)), rows_per_micro=2)
    device = torch.device("cpu")
    built = [build_micro_batch(rows, plan, device, share=parallel.share) for plan in plans]
    return [one for one in built if one is not None]


def run(model: str, file: str, layout: dict[str, Any], *, recomputes: bool) -> dict[str, float]:
    parallel = TorchDistributed(select_device("cpu"), TIMEOUT_S)
    sharding = msgspec.convert({"dtype": "float32", **layout}, ActorFsdpConfig)
    parallel.share_sequences(sharding.ulysses_sequence_parallel_size)
    parallel.experts = sharding.expert_parallel_size
    device = torch.device("cpu")
    folder = ModelConfig(path=model, enable_gradient_checkpointing=recomputes)
    loaded = load_policy(folder, sharding, MOST_TOKENS, is_sharded=True)
    shards = share_model(loaded, sharding, parallel, key=ACTOR_SHARDING, device=device)
    assert shards is not None
    check_packing(loaded.model, share=parallel.share)

    def forward(micro_batch: MicroBatch) -> Tensor:
        found = token_outputs(loaded.model, micro_batch, temperature=1.0, entropy=EntropyUse.BONUS)
        assert found.entropy is not None
        return loss_of(found.logprobs, found.entropy, micro_batch.labels)

    passes = EvenPasses(shards, parallel, forward, device)
    micro_batches = _micro_batches(parallel)
    passes.begin(len(micro_batches))
    for micro_batch in micro_batches:
        loss = forward(micro_batch)
        passes.before_backward()
        loss.backward()
    passes.end_step()
    norm = ShardedGradients(list(shards.parameters.values()), parallel).norm()
    gradients = {name: one.grad for name, one in shards.parameters.items()}
    whole = {n: g.full_tensor() for n, g in gradients.items() if isinstance(g, DTensor)}
    assert whole.keys() == gradients.keys()
    if parallel.rank == 0:
        save_file(whole, Path(file))
    held = sum(p.to_local().numel() for p in shards.parameters.values() if isinstance(p, DTensor))
    parallel.close()
    return {"norm": norm, "held": held}


def main() -> int:
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(run(**json.loads(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
