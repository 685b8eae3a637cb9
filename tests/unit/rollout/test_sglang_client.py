"""What SGLang is asked for, what its outputs mean, and how it samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engines.sampling import plan_sampling, sample_keys, sample_tokens, uniforms
from services.rollout.engines.sglang.client import (
    read_delta,
    read_prompt_logprobs,
    sampling_parameters,
)
from services.rollout.engines.sglang.sampler import sample_rows, stream_seed, uniform_rows
from services.rollout.engines.sglang.scheduler import EVERY_TOKEN, StreamThrottle, held_samples
from services.rollout.engines.vendor_engines.request import SamplingChoice
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


def test_the_last_delta_holds_the_version_of_each_token() -> None:
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
    asked = sampling_parameters(_choice(0.7, 20), every_token=True)
    assert (asked["stop_token_ids"], asked["ignore_eos"]) == ([4, 5], False)
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.7, 0.9, 20)
    assert (asked["max_new_tokens"], asked["sampling_seed"]) == (7, -3)
    assert asked["stream_interval"] == EVERY_TOKEN


def test_the_best_token_at_a_temperature_is_not_taken_for_greedy() -> None:
    asked = sampling_parameters(_choice(0.7, 1), every_token=False)
    assert asked["top_k"] == -1
    assert 0 < float(str(asked["top_p"])) < 1e-30
    assert sampling_parameters(_choice(0.0, 1), every_token=True)["top_k"] == 1


def _sample(
    sampled: int,
    sent: int,
    *,
    ended: bool = False,
    stream: bool = True,
    interval: int | None = None,
) -> Any:
    """Stands for a request of SGLang's scheduler."""
    return SimpleNamespace(
        output_ids=[5] * sampled,
        send_token_offset=sent,
        sampling_params=SimpleNamespace(stream_interval=interval),
        stream=stream,
        finished=lambda: ended,
    )


def test_the_scheduler_holds_the_tokens_of_running_samples_but_the_first_for_a_while() -> None:
    now_s = 0.0
    hold = StreamThrottle(lambda: now_s)
    running, first, ended = _sample(4, 3), _sample(1, 0), _sample(4, 3, ended=True)
    streamed, other = _sample(4, 3, interval=EVERY_TOKEN), _sample(4, 3, stream=False)
    step = [running, first, ended, streamed, other]
    assert hold.choose(step) == step, "the first step"
    assert hold.choose(step) == [first, ended, streamed, other]
    now_s = 10.0
    assert hold.choose([first]) == [first], "a prompt's step"
    assert hold.choose(step) == step, "held long enough"
    assert hold.choose(step) == [first, ended, streamed, other]


def test_what_the_scheduler_holds_is_found_wherever_its_sample_is() -> None:
    running, last, retracted = _sample(4, 3), _sample(5, 3), _sample(6, 3)
    recomputed = _sample(7, 3)
    none_new, ended = _sample(4, 4), _sample(4, 3, ended=True)
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[running, none_new, ended]),
        last_batch=SimpleNamespace(reqs=[running, last]),
        waiting_queue=[retracted, _sample(0, 0)],
        chunked_req=recomputed,
    )
    held = {id(running), id(last), id(retracted), id(recomputed)}
    assert {id(one) for one in held_samples(scheduler)} == held
    assert len(held_samples(scheduler)) == 4
    scheduler.last_batch = scheduler.chunked_req = None
    assert {id(one) for one in held_samples(scheduler)} == {id(running), id(retracted)}


_VOCAB = 50


@given(
    seed=st.integers(-(2**70), 2**70),
    index=st.integers(0, 2**31),
    prompt=st.integers(1, 2**20),
    token=st.integers(0, 2**20),
)
def test_a_tokens_number_is_that_of_seed_sample_and_token_wherever_it_stands(
    seed: int, index: int, prompt: int, token: int
) -> None:
    stream = stream_seed(seed, index, prompt)
    assert -(2**63) <= stream < 2**63
    found = uniform_rows(torch.tensor([stream]), torch.tensor([prompt + token - 1]))
    expected = uniforms(sample_keys(seed, [index]), np.array([token]))
    assert found.dtype == torch.float64
    assert found.item() == expected[0]


@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, 1.0, -1)],
        [(0.7, 0.9, -1), (1.0, 1.0, -1), (0.0, 1.0, -1)],
        [(0.6, 0.8, 20), (1.3, 1.0, 5)],
        [(0.0, 1.0, -1), (0.9, 1.0, 3)],
        [(0.8, 0.95, -1), (0.6, 0.8, 20), (1.0, 1.0, -1), (0.0, 1.0, -1)],
    ],
)
def test_rows_are_sampled_and_scored_as_by_the_embedded_engine(
    rows: list[tuple[float, float, int]],
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(rows), _VOCAB, generator=generator) * 3
    temperature, top_p, top_k = (np.array(column) for column in zip(*rows, strict=True))
    plan = plan_sampling(temperature.astype(np.float32), top_p, top_k, _VOCAB, torch.device("cpu"))
    greedy = temperature == 0
    # What SGLang makes of a temperature of 0 and of no top-k.
    ks = np.where(greedy, 1, np.where(top_k < 0, 1 << 30, top_k))
    most = int(ks.max()) if (ks < _VOCAB).all() else None
    for uniform in np.linspace(0, 1 - 2**-52, 97):
        at = torch.full((len(rows),), float(uniform), dtype=torch.float64)
        found = sample_rows(
            logits,
            torch.from_numpy(np.where(greedy, 1.0, temperature)[:, None]).float(),
            torch.from_numpy(ks).int(),
            torch.from_numpy(top_p).float(),
            most,
            at,
        )
        expected = sample_tokens(logits, plan, at)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])


def test_the_prompts_logprobs_are_those_of_its_own_and_the_most_probable_tokens() -> None:
    output = _output(
        [4],
        1,
        input_token_logprobs=[(None, 3, None), (-2.0, 9, None), (-0.25, 5, None)],
        input_top_logprobs=[None, [(-0.5, 4, None)], [(-0.25, 5, None)]],
    )
    found = read_prompt_logprobs(output)
    assert found.logprobs.tolist() == [-2.0, -0.25]
    assert found.top_token_ids.tolist() == [4, 5]
    assert found.top_logprobs.tolist() == [-0.5, -0.25]
    alone = _output([4], 1, input_token_logprobs=[(None, 3, None)], input_top_logprobs=[None])
    assert read_prompt_logprobs(alone).logprobs.size == 0
