"""However a sample is cut into pieces, their sum is the sample."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.growing_sample import GrowingSample
from sluice.types import FinishReason, Rollout, VersionSpan


def whole(versions: list[int]) -> Rollout:
    """A sample whose token i was sampled by ``versions[i]``."""
    size = len(versions)
    starts = [i for i in range(size) if i == 0 or versions[i] != versions[i - 1]]
    ends = [*starts[1:], size] if starts else []
    return Rollout.of_one_turn(
        5,
        np.arange(size, dtype=np.uint32) + 100,
        -np.arange(size, dtype=np.float32),
        tuple(VersionSpan(versions[s], s, e) for s, e in zip(starts, ends, strict=True)),
        FinishReason.STOP,
        "text",
    )


def part(sample: Rollout, start: int, end: int) -> tuple[object, object, int]:
    """Tokens [start, end), which one version sampled."""
    (version,) = {s.version for s in sample.version_spans if s.start < end and s.end > start}
    return sample.token_ids[start:end], sample.behavior_logprobs[start:end], version


@given(st.data())
def test_any_cut_into_pieces_and_any_adoptions_give_the_same_sample(data: st.DataObject) -> None:
    versions = sorted(data.draw(st.lists(st.integers(0, 3), max_size=30)))
    sample = whole(versions)
    swaps = {span.start for span in sample.version_spans} | {0, sample.num_tokens}
    cuts = data.draw(st.sets(st.integers(0, sample.num_tokens))) | swaps
    places = sorted(cuts)
    grown = GrowingSample()
    for start, end in pairwise(places):
        grown.append(*part(sample, start, end))  # type: ignore[arg-type]
        if data.draw(st.booleans()):  # broken off here, and continued elsewhere
            partial = grown.rollout(5)
            assert partial.finish_reason is FinishReason.ABORTED
            assert partial.num_tokens == grown.num_tokens == end
            grown = GrowingSample()
            grown.adopt(partial)
    found = grown.rollout(5, FinishReason.STOP, "text")
    assert found.token_ids.tolist() == sample.token_ids.tolist()
    assert found.token_ids.dtype == np.uint32
    assert found.behavior_logprobs.tolist() == sample.behavior_logprobs.tolist()
    assert found.behavior_logprobs.dtype == np.float32
    assert found.version_spans == sample.version_spans


def test_what_was_handed_out_does_not_change_when_more_tokens_come() -> None:
    sample, grown = whole([0, 0, 1, 1]), GrowingSample()
    grown.append(*part(sample, 0, 2))  # type: ignore[arg-type]
    before = grown.rollout(5)
    grown.append(*part(sample, 2, 4))  # type: ignore[arg-type]
    assert before.token_ids.tolist() == [100, 101]
    assert grown.rollout(5).token_ids.tolist() == [100, 101, 102, 103]
