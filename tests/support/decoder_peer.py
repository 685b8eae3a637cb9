"""One of several ranks that take the gradient of `layer_parity`'s loss; rank 0 writes it to a file.

The only argument is a JSON object: the model's folder, the key ``actor`` with FSDP's settings,
whether it recomputes, and the file.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from services.trainer.learner.model.forward import token_outputs
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, share_model
from services.trainer.learner.ranks import TorchDistributed
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.select import select_device
from tests.support.layer_parity import TEMPERATURE, pack, parity_rows, weighed

TIMEOUT_S = 60.0


def main() -> int:
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    device = select_device("cpu")
    parallel = TorchDistributed(device, TIMEOUT_S)
    parallel.share_sequences(arguments["sharing"])
    precision = FsdpConfig(dtype="float32", forward_prefetch=arguments["recomputes"])
    settings = ModelConfig(
        path=arguments["model"], enable_gradient_checkpointing=arguments["recomputes"]
    )
    loaded = load_policy(settings, precision, 64, is_sharded=True)
    shards = share_model(
        loaded, precision, parallel, key=ACTOR_SHARDING, device=device.torch_device
    )
    assert shards is not None
    micro_batch = pack(parity_rows(parallel.data_rank, parallel.data_size), parallel.share)
    found = token_outputs(loaded.model, micro_batch, temperature=TEMPERATURE)
    weighed(found.logprobs, micro_batch).backward()
    gradients = {}
    for name, parameter in shards.parameters.items():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        gradients[name] = gradient.full_tensor()
    if parallel.rank == 0:
        save_file(gradients, arguments["file"])
    parallel.all_gather([0.0], "writing gradients")
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
