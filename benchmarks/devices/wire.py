"""A train batch of a published run's size on its way to the trainer's ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.parts import Part
from benchmarks.reporting import print_line
from tests.support.batch_server import ServedBatch, serving
from tests.support.trainer_ranks import ranks_of

_RANKS, _ANSWER_S = 4, 300.0
BATCH = ServedBatch(groups=512, samples=16, tokens=20_000, prompt_tokens=1000)


def measure() -> Mapping[str, Any]:
    """Let four gloo ranks take a batch from the reward service's calls, each its samples.

    The server's process has the calls' own code and a made-up batch. Bytes are those of messages:
    streamed from the service, and broadcast from rank 0.
    """
    with serving(BATCH) as server:
        given = {
            "address": server.address,
            "stall_s": _ANSWER_S,
            "mini_batch_groups": BATCH.groups,
            "timeout_s": _ANSWER_S,
        }
        with ranks_of("tests.support.sample_peer", _RANKS, given) as ranks:
            for rank in ranks:
                rank.answer(_ANSWER_S)
            ranks[0].tell("take 1")
            found = [rank.answer(_ANSWER_S) for rank in ranks]
            assert all(isinstance(one, dict) for one in found), found
            assert [rank.finish() for rank in ranks] == [0] * _RANKS
    print_line(
        json.dumps(
            {
                "row_mb": [one["row_bytes"] >> 20 for one in found],
                "in_mb": [one["bytes"] >> 20 for one in found],
                "cpu_s": [round(one["cpu_s"], 1) for one in found],
                "peak_mb": [round(one["peak_mb"]) for one in found],
            }
        )
    )
    return {
        "batch_bytes_ratio": max(one["bytes"] / one["row_bytes"] for one in found),
        "batch_s": found[0]["seconds"],
    }


PART = Part(lambda _: measure(), most={"batch_bytes_ratio": 1.2, "batch_s": 20.0})
