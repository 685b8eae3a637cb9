"""The last import of the process that forks: what forks would do late, then no garbage.

Transformers imports a model's module where it is first used, and compiles the patterns of all
models' weights, which each fork would do again. And each full collection of garbage in a fork would
walk, and so copy, all that was imported before: 0.26 of the 0.8 s of CPU time that a trainer rank
of a tiny model takes, once or twice. Torch fills its caches in the first step of a process: 0.17 of
the 0.45 s that a learner with a first step takes.
"""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import distributed
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from tests.support.tiny_policy import make_batch, make_config, save_model

for _family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
    import_module(f"transformers.models.{_family}.modeling_{_family}")
for _peer in ("gradient_peer", "counted_rank", "trained_rank", "sample_peer"):
    import_module(f"tests.support.{_peer}")
for _module in ("grpc._channel", "grpc._interceptor", "grpc._server", "encodings.idna"):
    import_module(_module)
get_checkpoint_conversion_mapping("qwen3")
with TemporaryDirectory() as _folder:
    _config = make_config(save_model(Path(_folder)), fsdp_config={"dtype": "bfloat16"})
    Learner(_config, ParallelContext(), total_steps=1).train_step(make_batch(), 1)
distributed.destroy_process_group()
gc.collect()
gc.freeze()
