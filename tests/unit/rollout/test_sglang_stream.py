"""What SGLang is asked for, and what its outputs say."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.engines.sglang.client import read_delta, sampling_parameters
from services.rollout.engines.vendor.request import SamplingChoice
from sluice.errors import EngineError


def _output(tokens: list[int], sampled: int, **reported: Any) -> dict[str, Any]:
    logprobs = [(-0.5 * token, token, None) for token in tokens]
    meta = {"finish_reason": None, "completion_tokens": sampled, "output_token_logprobs": logprobs}
    return {"output_ids": tokens, "meta_info": meta | reported}


def _choice(temperature: float, top_k: int) -> SamplingChoice:
    return SamplingChoice(temperature, 0.9, top_k, 7, -3, (4, 5))


def test_a_delta_holds_what_is_new() -> None:
    delta = read_delta("a", _output([4, 5], 2, cached_tokens=3), 0)
    assert (delta.token_ids, delta.logprobs) == ([4, 5], [-2.0, -2.5])
    assert (delta.finish_reason, delta.cached_tokens, delta.version_spans) == (None, 3, ())


@pytest.mark.parametrize("known", [1, 2])
def test_tokens_that_an_output_repeats_are_not_taken_again(known: int) -> None:
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    delta = read_delta("a", _output([5], 2, finish_reason=reason), known)
    assert delta.token_ids == [5][: 2 - known]
    assert len(delta.logprobs) == 2 - known
    assert delta.finish_reason == "abort"


def test_the_last_delta_says_which_weights_drew_which_token() -> None:
    spans = [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 5}]
    delta = read_delta(
        "a", _output([5], 5, finish_reason={"type": "stop"}, weight_versions=spans), 4
    )
    assert delta.version_spans == (("3", 0, 4), ("4", 4, 5))


def test_lost_tokens_and_lost_logprobs_are_errors() -> None:
    with pytest.raises(EngineError, match="3 tokens of sample a came as 1"):
        read_delta("a", _output([5], 4), 1)
    with pytest.raises(EngineError, match="0 logprobs"):
        read_delta("a", _output([5], 1, output_token_logprobs=[]), 0)


def test_a_refused_sample_is_an_error_with_sglangs_words() -> None:
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    with pytest.raises(EngineError, match="sample a was refused: too long"):
        read_delta("a", _output([], 0, finish_reason=reason), 0)


def test_stop_tokens_are_heeded_whether_or_not_end_tokens_are() -> None:
    asked = sampling_parameters(_choice(0.7, 20))
    assert (asked["stop_token_ids"], asked["ignore_eos"]) == ([4, 5], False)
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.7, 0.9, 20)
    assert (asked["max_new_tokens"], asked["sampling_seed"]) == (7, -3)


def test_the_best_token_at_a_temperature_is_not_taken_for_greedy() -> None:
    asked = sampling_parameters(_choice(0.7, 1))
    assert asked["top_k"] == -1
    assert 0 < float(str(asked["top_p"])) < 1e-30
    assert sampling_parameters(_choice(0.0, 1))["top_k"] == 1
