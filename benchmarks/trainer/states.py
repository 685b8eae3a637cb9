"""What ranks read at their start, what a save in shards blocks, and what other layouts load."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parts import tests_pass
from benchmarks.reporting import print_line
from tests.support.tiny_policy import save_model
from tests.support.trainer_ranks import ranks_of

_RANKS, _ANSWER_S = 4, 600.0
_OTHER_LAYOUTS = (
    "tests/multiprocess/test_checkpoint_layouts.py"
    "::test_four_ranks_checkpoint_resumes_bit_for_bit_in_any_other_layout"
)
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
    return worst | {"checkpoint_equal": tests_pass(_OTHER_LAYOUTS)}
