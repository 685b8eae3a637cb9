"""What ranks read at their start, what a save in shards blocks, and what other layouts load."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reporting import print_line
from tests.support.saved_states import are_equal
from tests.support.tiny_policy import save_model
from tests.support.trainer_ranks import end, ranks_of, trainer

_RANKS, _ANSWER_S = 4, 600.0
MODELS: Mapping[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "vocab_size": 16000,
    },
    "qwen3_moe": {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_hidden_layers": 2,
        "vocab_size": 8000,
    },
}
# Family, layout in which four ranks save, and others that load: number of ranks, keys.
_LAYOUTS: tuple[tuple[str, dict[str, int], list[tuple[int, dict[str, int]]]], ...] = (
    ("qwen3", {}, [(2, {}), (4, {"fsdp_size": 2}), (2, {"fsdp_size": 1})]),
    (
        "qwen3_moe",
        {"expert_parallel_size": 2},
        [
            (2, {}),
            (4, {"expert_parallel_size": 4}),
            (4, {"expert_parallel_size": 2, "fsdp_size": 2}),
        ],
    ),
)


def states() -> dict[str, Any]:
    """Return the figures of starts, saves and streams, each the worst rank's of the worst model."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for family, changes in MODELS.items():
            model = save_model(Path(folder) / family, family, **changes)
            arguments = {"model": str(model), "saved": str(Path(folder) / f"{family}-saved")}
            with ranks_of("benchmarks.trainer.state_peer", _RANKS, arguments) as ranks:
                answers = [rank.answer(_ANSWER_S) for rank in ranks]
            one = {
                "read_share_worst": max(answer["read"] / answer["own"] for answer in answers),
                "async_block_share": max(median(answer["blocked"]) for answer in answers),
                "beside_buckets_worst": max(answer["beside_buckets"] for answer in answers),
            }
            print_line(f"{family}: {one}")
            found.append(one)
    worst = {key: round(max(one[key] for one in found), 4) for key in found[0]}
    return worst | {"checkpoint_equal": _is_equal_in_all_layouts()}


def _is_equal_in_all_layouts() -> bool:
    equal = True
    for family, layout, others in _LAYOUTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model, saved = save_model(folder / "model", family), folder / "saved" / "actor"
            with trainer(model, _RANKS, **_keys(layout)) as ranks:
                ranks[0].command("train 1")
                ranks[0].command(f"save {saved}")
                end(ranks)
            for number, (size, other) in enumerate(others):
                again = folder / str(number) / "actor"
                with trainer(model, size, **_keys(other)) as ranks:
                    ranks[0].command(f"load {saved}")
                    ranks[0].command(f"save {again}")
                    end(ranks)
                is_equal = are_equal(saved, again)
                print_line(f"{family}, saved in {layout}, loaded in {size} {other}: {is_equal}")
                equal = equal and is_equal
    return equal


def _keys(layout: dict[str, int]) -> dict[str, Any]:
    return {"ppo_micro_batch_size_per_gpu": 3, "fsdp_config": {"dtype": "float32", **layout}}
