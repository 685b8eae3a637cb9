"""Measure updates of random models on this GPU: speed, and memory against its prediction."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig

from benchmarks.reporting import print_line, print_report
from services.trainer.learner import learner as learner_module
from services.trainer.learner.learner import Learner
from services.trainer.learner.model.loading import LoadedModel, build_policy
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.step_measures import update_flops
from sluice.config.loading.loader import load_config
from sluice.config.memory.rollout import GIB
from sluice.config.memory.shape import read_shape
from sluice.config.run import RunConfig
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.select import select_device
from sluice.plan.launch_plan import local_model, trainer_as_written
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)
from tests.support.accelerator import accelerator, is_rehearsal
from tools.phases import tool_parser

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model's shape, its layers here and in the published figures, and a batch's lengths."""

    settings: Mapping[str, Any]
    layers: int
    full_layers: int
    prompt_tokens: int = 512
    response_tokens: int = 7680
    micro_tokens: int = 16_384


# Qwen3's shapes with fewer layers, so that all of them fit into minutes.
MODELS: Mapping[str, Subject] = {
    "1.7b": Subject(
        {
            **_QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        layers=14,
        full_layers=28,
    ),
    "8b": Subject(
        {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
        layers=4,
        full_layers=8,
    ),
    "30b-a3b": Subject(
        {
            **_QWEN3,
            **_EXPERTS,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
        },
        layers=2,
        full_layers=4,
    ),
    "tiny": Subject({**_QWEN3, **_TINY, "tie_word_embeddings": True}, 2, 2, 16, 64, 256),
    "tiny-experts": Subject(
        {**_QWEN3, **_EXPERTS, **_TINY, "moe_intermediate_size": 32, "num_experts": 16},
        *(2, 2, 16, 64, 256),
    ),
}
GROUPS, SAMPLES = 4, 4
STEPS = 2
_SEED_SCALE = 0.02


def save_config(subject: Subject, layers: int, folder: Path) -> None:
    """Write what the trainer and the plan read of a model beside its weights."""
    settings = {
        **subject.settings,
        "num_hidden_layers": layers,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
    }
    AutoConfig.for_model(settings.pop("model_type"), **settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def made_policy(
    model: ModelConfig, precision: FsdpConfig, max_tokens: int, *, is_sharded: bool = False
) -> LoadedModel:
    """`load_policy` with random weights, which are made on the device and never on disk."""
    del is_sharded
    config = AutoConfig.from_pretrained(model.path)
    torch.manual_seed(0)
    with torch.device(accelerator()):
        built = build_policy(config, model, precision, max_tokens)
    for parameter in built.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=_SEED_SCALE)
        else:
            nn.init.ones_(parameter)
    return LoadedModel(built)


def run_config(subject: Subject, folder: Path, *, compiled: bool) -> RunConfig:
    """Return a run that trains it in bfloat16 with float32 masters."""
    return load_config(
        None,
        [
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={subject.micro_tokens}",
            "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
            "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",
            f"actor_rollout_ref.actor.fsdp_config.use_torch_compile={str(compiled).lower()}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"data.train_batch_size={GROUPS}",
            f"data.max_prompt_length={subject.prompt_tokens}",
            f"data.max_response_length={subject.response_tokens}",
            f"trainer.device={accelerator()}",
        ],
    )


def made_up_batch(subject: Subject, seed: int) -> TrainBatch:
    """Return a batch of random tokens; responses have about the length that they may."""
    random = np.random.default_rng(seed)
    vocabulary, longest = subject.settings["vocab_size"], subject.response_tokens
    shortest = longest * 15 // 16

    def rollout(index: int) -> Rollout:
        length = int(random.integers(shortest, longest + 1))
        return Rollout.of_one_turn(
            sample_index=index,
            token_ids=random.integers(vocabulary, size=length).astype(np.uint32),
            behavior_logprobs=-12 - random.random(length).astype(np.float32),
            version_spans=(VersionSpan(0, 0, length),),
            finish_reason=FinishReason.STOP,
            text="",
        )

    groups = tuple(
        TrainGroup(
            prompt_id=f"prompt-{number}",
            prompt_token_ids=random.integers(vocabulary, size=subject.prompt_tokens).astype(
                np.uint32
            ),
            rollouts=tuple(rollout(index) for index in range(SAMPLES)),
            scores=tuple(Scored(one, one, {"acc": one}) for one in (1.0, 0.0) * (SAMPLES // 2)),
            data_source="made up",
        )
        for number in range(GROUPS)
    )
    return TrainBatch(f"batch-{seed}", 0, groups, DataProgress(GROUPS), {})


def measured(subject: Subject, *, layers: int, compiled: bool) -> dict[str, float | None]:
    """Train some steps; return the figures of the last ones."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save_config(subject, layers, folder)
        config = run_config(subject, folder, compiled=compiled)
        shape = read_shape(folder / "config.json")
        model = local_model(str(folder))
        assert model is not None
        planned = trainer_as_written(config, model).peak / GIB
        device = select_device(accelerator())
        with mock.patch.object(learner_module, "load_policy", made_policy):
            learner = Learner(config, ParallelContext(accelerator()), total_steps=10, device=device)
        made_s = time.perf_counter() - began_s
        batch = made_up_batch(subject, 0)
        learner.train_step(batch, 1)  # compiles, and makes the optimizer's state
        device.synchronize()
        first_s = time.perf_counter() - began_s - made_s
        learner.peaks.take_metrics()
        seconds = []
        for step in range(2, 2 + STEPS):
            began_s = time.perf_counter()
            metrics = learner.train_step(batch, step)
            device.synchronize()
            seconds.append(time.perf_counter() - began_s)
            print_line(", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if "timing" in k))
        peaks = learner.peaks.take_metrics()
    tokens = sum(one.num_tokens for group in batch.groups for one in group.rollouts)
    # The host's is the whole process's, which has other models behind it.
    peak = max((s for n, s in peaks.items() if n.startswith("memory_gb/")), default=None)
    rate, flops = device.peak_flops(), update_flops(shape, batch, ())
    return {
        "layers": layers,
        "parameters": shape.total_parameters,
        "made_s": round(made_s, 1),
        "first_step_s": round(first_s, 1),
        "response_tokens_per_s": round(tokens / median(seconds)),
        "step_s": round(median(seconds), 3),
        "mfu": round(flops / median(seconds) / rate, 3) if rate else None,
        **{name: round(size, 2) for name, size in peaks.items()},
        "planned_gib": round(planned, 2),
        "peak_over_planned": round(peak / planned, 3) if peak and not is_rehearsal() else None,
    }


def forget() -> None:
    """Give the memory of a measured model back, so that the next one finds it free."""
    gc.collect()
    torch.compiler.reset()
    select_device(accelerator()).empty_cache()


def main(arguments: Sequence[str]) -> int:
    """Measure one model after the other; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.gpu_smoke.update 1.7b --full")
    parser.add_argument("models", choices=MODELS, nargs="+")
    parser.add_argument("--full", action="store_true", help="the layers of the published figures")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parsed = parser.parse_args(arguments)
    found: dict[str, object] = {}
    for name in parsed.models:
        subject = MODELS[name]
        found[name] = measured(
            subject,
            layers=subject.full_layers if parsed.full else subject.layers,
            compiled=parsed.compile,
        )
        # Lines so far are kept if the next one fails.
        print_line(f"{name}: {json.dumps(found[name])}")
        forget()
    return print_report(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
