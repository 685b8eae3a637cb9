"""Count the bytes of a trainer rank's passes in one process, without devices.

``python -m services.trainer.dry_run`` reads `DryRunRequest` from standard input and writes a list
of `PassBytes` to standard output, one for each run.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import torch
from msgspec import structs

from services.trainer.dry_run.measure import FakeRanks, fake_tensors, measure_passes
from sluice.algorithm import token_statistics
from sluice.checkpoint.adapter_files import read_adapter
from sluice.concurrency.answers import serve_answer
from sluice.concurrency.process import exit_status
from sluice.config.parallel_layout import trainer_layout
from sluice.config.run import RunConfig
from sluice.plan.dry_run import DryRunRequest, PassBytes

_BYTES_OF_A_LOGIT = 10
"""In an uncompiled block: the logit in 16 bits and in float32, and its exponential."""
_IN_LAYER = re.compile(r".*\blayers\.\d+\.")


def dry_run(request: DryRunRequest) -> list[PassBytes]:
    """Return the bytes of each run."""
    torch.set_num_threads(1)
    config = with_adapters(msgspec.convert(request.config, RunConfig))
    # Compute the head in blocks as large as on a GPU, and with a GPU's matrix products.
    token_statistics.CPU_BLOCK_ELEMENTS = token_statistics.DEVICE_BLOCK_ELEMENTS
    if config.actor_rollout_ref.actor.fsdp_config.use_torch_compile:
        compiled_bytes = 2 * token_statistics.COMPILED_BLOCK_BYTES
        token_statistics.CPU_BLOCK_ELEMENTS = compiled_bytes // _BYTES_OF_A_LOGIT
    if (config.trainer.device or "cuda").startswith("cuda"):
        token_statistics.widens = token_statistics.is_half
        # It needs no memory, and torch before 2.12 cannot fake it.
        token_statistics._add_product = lambda total, left, right: None
    parallel = FakeRanks(request.ranks)
    torch.compile = lambda function: function  # type: ignore[assignment]  # not of fake tensors
    gc.freeze()  # imported objects are not garbage
    try:
        with fake_tensors():
            parallel.divide(trainer_layout(config, request.ranks))
            passes = []
            for stage, layers in request.runs:
                parallel.move_to(stage)
                passes.append(measure_passes(config, with_layers(request.model, layers), parallel))
            return passes
    finally:
        parallel.close()


def with_layers(model: Mapping[str, object], layers: int) -> dict[str, object]:
    """Return a config.json's content with another number of layers."""
    changed = {**model, "num_hidden_layers": layers}
    kinds = model.get("layer_types")
    if isinstance(kinds, list):
        changed["layer_types"] = (kinds * layers)[:layers]
    return changed


def with_adapters(config: RunConfig) -> RunConfig:
    """Return the run with adapters that fit a model with any number of layers.

    Adapters from `lora_adapter_path` are replaced by new ones of the same rank. A layer named with
    its number stands for that layer in every decoder layer.

    Raises:
        CheckpointError: the folder holds no adapter.
    """
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is not None:
        saved = read_adapter(Path(model.lora_adapter_path))
        inside = [name for name in saved.layers if _IN_LAYER.match(name)]
        model = structs.replace(
            model,
            lora_adapter_path=None,
            lora_rank=saved.rank,
            exclude_modules=None,
            target_modules=_without_layer_numbers(inside),
        )
    elif isinstance(model.target_modules, list):
        model = structs.replace(model, target_modules=_without_layer_numbers(model.target_modules))
    policy = structs.replace(config.actor_rollout_ref, model=model)
    return structs.replace(config, actor_rollout_ref=policy)


def _without_layer_numbers(names: Collection[str]) -> list[str]:
    return sorted({_IN_LAYER.sub("", name) for name in names})


def main() -> None:
    """Answer on standard output; nothing else gets there."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    serve_answer(DryRunRequest, dry_run)


if __name__ == "__main__":
    sys.exit(exit_status("sluice", main))
