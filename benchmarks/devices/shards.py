"""Trainer ranks that share a model: what each of them holds and sends when it is published."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.parts import Part
from benchmarks.reporting import print_line
from tests.support.tiny_policy import save_model
from tests.support.trainer_ranks import ranks_of

_RANKS, _ANSWER_S, _SNAPSHOTS = 2, 300.0, 2
_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "vocab_size": 16000,
}


def measure() -> Mapping[str, Any]:
    """Let two ranks with half of a llama each publish three versions to one replica over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", "llama", **_MODEL)
        arguments = {"model": str(model)}
        with ranks_of("benchmarks.devices.shard_peer", _RANKS, arguments) as ranks:
            answers = [rank.answer(_ANSWER_S) for rank in ranks]
    sent, held = answers[0]["sent"], [answer["held"] for answer in answers]
    more = [answer["more"] for answer in answers]
    print_line(
        json.dumps(
            {
                "model_mb": sum(held) >> 20,
                "sent_mb": [one >> 20 for one in sent],
                "beside_shards_mb": [one >> 20 for one in more],
            }
        )
    )
    return {
        "rank_host_ratio": max(
            one / (_SNAPSHOTS * own) for one, own in zip(more, held, strict=True)
        ),
        "rank_bytes_ratio": max(sent) / (sum(held) / _RANKS),
    }


PART = Part(lambda _: measure(), most={"rank_host_ratio": 1.2, "rank_bytes_ratio": 1.1})
