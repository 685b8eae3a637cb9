"""Measure updates of a random model on this GPU: speed, and memory against its prediction."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.reporting import print_line, print_report
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel
from services.trainer.learner.update.flops import update_flops
from sluice.config.loading.loader import load_config
from sluice.config.memory.rollout import GIB
from sluice.config.memory.shape import read_shape
from sluice.config.run import RunConfig
from sluice.plan.launch_plan import local_model, written_trainer
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)
from tools.phases import tool_parser

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# Qwen3's shapes, the larger two with fewer layers.
MODELS: dict[str, dict[str, Any]] = {
    "1.7b": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
GROUPS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 512, 7680
MICRO_TOKENS, STEPS, SHOWN_KERNELS = 16_384, 2, 30
# Dense bf16 FLOP/s by the vendor's data sheet.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "H800": 989e12, "B200": 2250e12}


def save_model(name: str, folder: Path) -> None:
    """Write a random model of a shape."""
    settings = {"max_position_embeddings": 32_768, "rope_theta": 1e6, **MODELS[name]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def run_config(folder: Path, *, compiled: bool) -> RunConfig:
    """Return a run that trains it in bfloat16 with float32 masters."""
    return load_config(
        None,
        [
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={MICRO_TOKENS}",
            "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
            "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",
            f"actor_rollout_ref.actor.fsdp_config.use_torch_compile={str(compiled).lower()}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            f"data.train_batch_size={GROUPS}",
            f"data.max_prompt_length={PROMPT_TOKENS}",
            f"data.max_response_length={RESPONSE_TOKENS}",
            "trainer.device=cuda",
        ],
    )


def made_up_batch(vocabulary: int, seed: int) -> TrainBatch:
    """Return a batch of random tokens; responses have about the length that they may."""
    random = np.random.default_rng(seed)

    def rollout(index: int) -> Rollout:
        length = int(random.integers(RESPONSE_TOKENS * 15 // 16, RESPONSE_TOKENS + 1))
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
            prompt_token_ids=random.integers(vocabulary, size=PROMPT_TOKENS).astype(np.uint32),
            rollouts=tuple(rollout(index) for index in range(SAMPLES)),
            scores=tuple(Scored(one, one, {"acc": one}) for one in (1.0, 0.0) * (SAMPLES // 2)),
            data_source="made up",
        )
        for number in range(GROUPS)
    )
    return TrainBatch(f"batch-{seed}", 0, groups, DataProgress(GROUPS), {})


def measured(name: str, *, compiled: bool, profiled: bool) -> dict[str, float]:
    """Train some steps; return the figures of the last ones."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save_model(name, folder)
        config = run_config(folder, compiled=compiled)
        shape = read_shape(folder / "config.json")
        learner = Learner(config, DataParallel("cuda"), total_steps=10)
        batch = made_up_batch(shape.vocab, 0)
        learner.train_step(batch, 1)  # the first one makes the optimizer's state
        learner.peaks.take_metrics()
        seconds = []
        for step in range(2, 2 + STEPS):
            began_s = time.perf_counter()
            metrics = learner.train_step(batch, step)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began_s)
            print_line(", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if "timing" in k))
        peaks = learner.peaks.take_metrics()
        if profiled:
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                learner.train_step(batch, 2 + STEPS)
                torch.cuda.synchronize()
            print_kernels(found)
        model = local_model(str(folder))
        assert model is not None
        planned = written_trainer(config, model).peak / GIB
    tokens = sum(one.num_tokens for group in batch.groups for one in group.rollouts)
    peak = max(size for name, size in peaks.items() if name.startswith("memory_gb/"))
    device = torch.cuda.get_device_name()
    flops = next((rate for chip, rate in PEAK_FLOPS.items() if chip in device), None)
    return {
        "parameters": shape.total_parameters,
        "response_tokens_per_s": round(tokens / median(seconds)),
        "step_s": round(median(seconds), 3),
        **(
            {"mfu": round(update_flops(shape, batch, ()) / median(seconds) / flops, 3)}
            if flops
            else {}
        ),
        **{name: round(size, 2) for name, size in peaks.items()},
        "peak_gib": round(peak, 2),
        "planned_gib": round(planned, 2),
        "peak_over_planned": round(peak / planned, 3),
    }


def print_kernels(found: profile) -> None:
    """Print where a profiled step's time went on the device, a line a kernel."""
    kernels = [one for one in found.key_averages() if one.device_type.name == "CUDA"]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in kernels)
    print_line(f"kernels of a step: {total / 1e3:.0f} ms")
    for one in kernels[:SHOWN_KERNELS]:
        ms = one.self_device_time_total / 1e3
        print_line(f"{ms:9.1f} ms {one.count:6} x  {one.key[:100]}")


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.gpu_smoke.update 1.7b")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one more step")
    parsed = parser.parse_args(arguments)
    return print_report(
        measured(
            parsed.model,
            compiled=parsed.compile,
            profiled=parsed.profile,
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
