"""A sample in SGLang's words: what is asked for, and what each output adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from services.rollout.engines.sample_deltas import Delta, SamplingChoice
from sluice.errors import EngineError

__all__ = ["read_delta", "sampling_parameters"]

_ONE_TOKEN = float(np.finfo(np.float32).tiny)
"""A nucleus that holds the most probable token only."""


def sampling_parameters(choice: SamplingChoice) -> dict[str, object]:
    """What a request of SGLang says of how to sample."""
    top_k, top_p = choice.top_k, choice.top_p
    if top_k == 1 and choice.temperature > 0:
        # To SGLang that is temperature 0, whose logprobs are those at temperature 1.
        top_k, top_p = -1, _ONE_TOKEN
    return {
        "temperature": choice.temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": choice.max_tokens,
        "sampling_seed": choice.seed,
        "stop_token_ids": list(choice.stop_token_ids),
        # Otherwise it would ignore stop tokens too; that the model's end tokens are among them, or
        # do not end a sample, is seen to in the scheduler.
        "ignore_eos": False,
    }


def read_delta(request_id: str, output: Mapping[str, Any], known: int) -> Delta:
    """What is new in an output of SGLang; some repeat a token that came before.

    Args:
        request_id: for errors.
        known: tokens of the sample that came before.

    Raises:
        EngineError: SGLang refused the sample, or tokens are missing.
    """
    reported = output["meta_info"]
    reason = reported.get("finish_reason") or {}
    if reason.get("type") == "abort" and reason.get("status_code") is not None:
        raise EngineError(f"SGLang: sample {request_id} was refused: {reason.get('message')}")
    new = int(reported["completion_tokens"]) - known
    tokens = list(output["output_ids"])[-new:] if new else []
    logprobs = [float(one[0]) for one in reported.get("output_token_logprobs", ())][-new:]
    if len(tokens) != new or (new and len(logprobs) != new):
        raise EngineError(
            f"SGLang: {new} tokens of sample {request_id} came as {len(tokens)} token ids with "
            f"{len(logprobs)} logprobs"
        )
    return Delta(
        tokens,
        logprobs if new else [],
        reason.get("type"),
        reported.get("cached_tokens"),
        tuple(
            (one["version"], one["start"], one["end"])
            for one in reported.get("weight_versions", ())
        ),
    )
