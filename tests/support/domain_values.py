"""Hypothesis strategies for the values that travel between services."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sluice.types import (
    DataProgress,
    FinishReason,
    ReplicaInfo,
    Rollout,
    RoutedExperts,
    SamplingParams,
    Scored,
    TensorSpec,
    TrainBatch,
    TrainGroup,
    TransferGroupSpec,
    VersionSpan,
)
from sluice.weight_share import Cut, Holding, WeightShare, WorkerPlace

names = st.text(min_size=1, max_size=8)
words = st.text(max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
uint32 = st.integers(0, 2**32 - 1)
int64 = st.integers(0, 2**63 - 1)
token_ids = st.lists(uint32, max_size=9).map(lambda ids: np.array(ids, np.uint32))


def with_turn(rollout: Rollout, **changes: Any) -> Rollout:
    """Return the sample with another value of its only turn."""
    (turn,) = rollout.turns
    return replace(rollout, turns=(replace(turn, **changes),))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    ids = draw(token_ids)
    cuts = sorted(draw(st.sets(st.integers(1, max(ids.size - 1, 1)), max_size=3)))
    edges = sorted({0, *(cut for cut in cuts if cut < ids.size), ids.size})
    return Rollout.of_one_turn(
        sample_index=draw(uint32),
        token_ids=ids,
        behavior_logprobs=np.array(
            draw(st.lists(st.floats(-50, 0, width=32), min_size=ids.size, max_size=ids.size)),
            np.float32,
        ),
        version_spans=tuple(
            VersionSpan(draw(int64), start, end) for start, end in itertools.pairwise(edges)
        ),
        finish_reason=draw(st.sampled_from(FinishReason)),
        text=draw(words),
    )


scores = st.builds(
    Scored,
    score=finite,
    reward=finite,
    metrics=st.dictionaries(words, finite, max_size=3),
    prediction=st.none() | words,
)


@st.composite
def routed_experts(draw: st.DrawFn, min_tokens: int) -> RoutedExperts:
    """Experts of at least so many tokens."""
    layers, chosen = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = (min_tokens + draw(st.integers(0, 2)), layers, chosen)
    dtype = draw(st.sampled_from((np.uint8, np.uint16)))
    found: RoutedExperts = draw(arrays(dtype, shape))
    return found


@st.composite
def train_groups(draw: st.DrawFn) -> TrainGroup:
    samples = tuple(draw(st.lists(rollouts(), max_size=3)))
    grades = draw(st.lists(scores, min_size=len(samples), max_size=len(samples)))
    return TrainGroup(
        draw(names), draw(token_ids), samples, tuple(grades), draw(words), source=draw(words)
    )


_progresses = st.builds(DataProgress, int64, st.lists(int64, max_size=4).map(tuple))
progresses = st.builds(
    DataProgress,
    int64,
    st.lists(int64, max_size=4).map(tuple),
    st.dictionaries(names, _progresses, max_size=2),
)
train_batches = st.builds(
    TrainBatch,
    batch_id=names,
    policy_version=int64,
    groups=st.lists(train_groups(), max_size=2).map(tuple),
    progress=progresses,
    statistics=st.dictionaries(words, finite, max_size=3),
)
replicas = st.builds(
    ReplicaInfo, names, names, names, st.integers(1, 2**32 - 1), st.integers(1, 1024)
)
single = st.floats(0, 100, width=32)
samplings = st.builds(
    SamplingParams,
    temperature=single,
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    top_k=st.just(-1) | st.integers(1, 2**31 - 1),
    max_tokens=st.integers(1, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(uint32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    stop=st.lists(words, max_size=3).map(tuple),
)
tensor_specs = st.builds(
    TensorSpec,
    names,
    st.sampled_from(["float32", "bfloat16"]),
    st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
)


ranges = st.tuples(st.integers(0, 2**40), st.integers(1, 2**40))
cuts = st.builds(Cut, st.integers(0, 7), st.lists(ranges, min_size=1, max_size=3).map(tuple))
weight_shares = st.builds(
    WeightShare,
    st.lists(st.tuples(words, st.lists(cuts, min_size=1, max_size=2).map(tuple)), max_size=3).map(
        tuple
    ),
)
holdings = st.builds(
    Holding,
    st.integers(0, 1000),
    st.lists(st.tuples(words, st.lists(cuts, max_size=2).map(tuple)), max_size=3).map(tuple),
)


@st.composite
def transfer_groups(draw: st.DrawFn) -> TransferGroupSpec:
    world_size = draw(st.integers(2, 1000))
    rank = draw(st.integers(1, world_size - 1))
    return TransferGroupSpec(
        epoch=draw(int64),
        host=draw(words),
        port=draw(st.integers(0, 65535)),
        rank=rank,
        world_size=world_size,
        backend=draw(st.sampled_from(["gloo", "nccl"])),
        bucket_bytes=draw(int64),
        timeout_s=draw(st.floats(0, 1000)),
        tensors=tuple(draw(st.lists(tensor_specs, max_size=3))),
        plan_digest=draw(words),
        store_key=draw(st.sampled_from([b"", bytes(range(32))])),
        ranks=draw(st.integers(1, world_size - rank)),
        holdings=tuple(draw(st.lists(holdings, max_size=2))),
    )


worker_places = st.builds(
    WorkerPlace,
    st.integers(0, 65535),
    st.integers(1, 9),
    st.integers(10, 99),
    st.sampled_from(["ab", "cd"]),
)
