"""Run the quickstart in one of the layouts of `gpu_smoke` and `day1`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks.reporting import empty_run_folder, print_report, quickstart
from sluice.quickstart import model
from sluice.quickstart.arithmetic import Family
from tests.support.accelerator import accelerator, is_rehearsal
from tools.phases import tool_parser

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

_MAKE_CONFIG = model.make_config
_VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
)
# Weights travel by the device's own collectives, which is NCCL, but where both ends share a GPU.
LAYOUTS: Mapping[str, Sequence[str]] = {
    "one_gpu": ("sluice.weights.backend=gloo",),
    "nccl": (),
    "vllm": _VLLM,
    "shards": (
        *_VLLM,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ),
}
_FIGURES = (
    "outcome",
    "steps",
    "accuracy_before",
    "accuracy_after",
    "seconds_total",
    "seconds_dapo",
    "generated_tokens",
    "prompts_lost",
    "max_staleness_seen",
)
_REHEARSAL = ("trainer.total_training_steps=3", "trainer.test_freq=3")


def overrides(layout: str) -> list[str]:
    """Return the keys of a layout on this machine."""
    everywhere = (
        f"trainer.device={accelerator()}",
        f"sluice.rollout.device={accelerator()}",
        "sluice.rollout.replicas=1",
        "trainer.logger=[jsonl]",
    )
    found = [*everywhere, *LAYOUTS[layout]]
    if is_rehearsal():
        return [*found, *_REHEARSAL]
    if "actor_rollout_ref.rollout.name=vllm" in found:
        found.append("actor_rollout_ref.rollout.dtype=bfloat16")  # FlashAttention has no float32
    return found


def _with_heads_for_vllm(
    tokenizer: Tokenizer, num_experts: int = 0, family: Family = "qwen3"
) -> Qwen2Config | Qwen3Config | Qwen3MoeConfig:
    """The quickstart's model with heads of 64: vLLM has no kernel for its heads of 16."""
    config = _MAKE_CONFIG(tokenizer, num_experts, family)
    config.head_dim = 64
    return config


def main(arguments: Sequence[str]) -> int:
    """Train; return the exit status, 1 if prompts were lost."""
    parser = tool_parser(__doc__, "python -m benchmarks.gpu_smoke.quickstart nccl")
    parser.add_argument("layout", choices=LAYOUTS)
    layout = parser.parse_args(arguments).layout
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if "actor_rollout_ref.rollout.name=vllm" in LAYOUTS[layout]:
            with mock.patch.object(model, "make_config", _with_heads_for_vllm):
                empty_run_folder(run, Path(folder) / "assets", "quickstart", 0)
        summary = quickstart(run, 0, overrides(layout))
    print_report({name: summary[name] for name in _FIGURES})
    return 1 if summary["prompts_lost"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
