"""Each token that a replica sent is counted once, whatever message it came in."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.reward.generation.request import GenerateEvent
from services.reward.records.tokens import GroupTrace
from sluice.algorithm.growing_sample import NewTokens
from sluice.types import FinishReason, Rollout, SamplingParams, VersionSpan

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=99, seed=0)


def whole(index: int, size: int, reason: FinishReason = FinishReason.STOP) -> Rollout:
    spans = (VersionSpan(0, 0, size),) if size else ()
    return Rollout(index, np.zeros(size, np.uint32), np.zeros(size, np.float32), spans, reason, "")


def delta(index: int, size: int) -> NewTokens:
    return NewTokens(index, np.zeros(size, np.uint32), np.zeros(size, np.float32), 0)


def event(*parts: Any) -> GenerateEvent:
    rollouts = tuple(part for part in parts if isinstance(part, Rollout))
    return GenerateEvent(None, rollouts, tuple(p for p in parts if isinstance(p, NewTokens)))


def test_a_whole_sample_counts_only_what_did_not_come_before() -> None:
    trace = GroupTrace()
    trace.asked(SAMPLING, (0, 1), ())
    trace.arrived(SAMPLING, event(delta(0, 3), delta(1, 4)))
    trace.arrived(SAMPLING, event(delta(1, 2), whole(0, 5)))
    trace.arrived(SAMPLING, event(whole(1, 6)))
    assert (trace.num_tokens, trace.num_thrown_away_tokens) == (11, 0)


def test_tokens_of_a_sample_that_starts_again_stay_counted_and_are_told() -> None:
    trace = GroupTrace()
    trace.asked(SAMPLING, (0, 1, 2), ())
    trace.arrived(SAMPLING, event(delta(0, 3), delta(1, 4), whole(2, 9)))
    trace.asked(SAMPLING, (0, 1), (whole(1, 4, FinishReason.ABORTED),))
    assert (trace.num_tokens, trace.num_thrown_away_tokens) == (16, 3)
    trace.arrived(SAMPLING, event(whole(0, 5), whole(1, 6)))
    assert (trace.num_tokens, trace.num_thrown_away_tokens) == (16 + 5 + 2, 3)


def test_samples_of_other_sampling_parameters_are_others() -> None:
    greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=99, seed=0)
    trace = GroupTrace()
    trace.asked(SAMPLING, (0,), ())
    trace.asked(greedy, (0,), ())
    trace.arrived(SAMPLING, event(delta(0, 3)))
    trace.arrived(greedy, event(whole(0, 7)))
    trace.arrived(SAMPLING, event(whole(0, 4)))
    assert (trace.num_tokens, trace.num_thrown_away_tokens) == (11, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["on", "cut", "lost"])), max_size=12))
def test_received_is_what_the_sample_holds_and_what_was_thrown_away(
    steps: list[tuple[int, str]],
) -> None:
    trace, held, received = GroupTrace(), 0, 0
    trace.asked(SAMPLING, (0,), ())
    for size, then in steps:
        trace.arrived(SAMPLING, event(delta(0, size)))
        held, received = held + size, received + size
        if then == "cut":
            trace.asked(SAMPLING, (0,), (whole(0, held, FinishReason.ABORTED),))
        elif then == "lost":
            trace.asked(SAMPLING, (0,), ())
            held = 0
        assert trace.num_tokens == received
        assert trace.num_tokens - trace.num_thrown_away_tokens == held
    trace.arrived(SAMPLING, event(whole(0, held + 5)))
    assert trace.num_tokens - trace.num_thrown_away_tokens == held + 5
