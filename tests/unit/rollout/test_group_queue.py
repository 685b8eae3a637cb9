"""Which waiting samples enter, and what is prefilled together."""

from __future__ import annotations

from collections import deque

import numpy as np

from services.rollout.engines.embedded.loop import GroupQueue, WaitingGroup, prefill_batches
from services.rollout.engines.embedded.rows import RunningSample


def _group(owner: str, samples: int, tokens: int = 3) -> WaitingGroup:
    prompt = np.arange(tokens)
    return WaitingGroup(
        prompt,
        deque(
            RunningSample(
                owner=owner,
                sample_index=index,
                tokens=prompt,
                prompt_length=tokens,
                length_limit=tokens + 4,
                stop_ids=(),
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                key=np.uint64(index),
                streaming=False,
            )
            for index in range(samples)
        ),
    )


def _queue(slots: int, *groups: WaitingGroup) -> GroupQueue:
    queue = GroupQueue(slots)
    for group in groups:
        queue.append(group)
    return queue


def _admitted(queue: GroupQueue, free: int) -> list[tuple[object, int]]:
    return [(a.samples[0].owner, len(a.samples)) for a in queue.admit(free)]


def test_groups_enter_in_order_of_arrival_and_only_the_first_is_split() -> None:
    queue = _queue(8, _group("a", 4), _group("b", 8), _group("c", 1))
    assert _admitted(queue, 8) == [("a", 4), ("b", 4)]
    assert queue.waiting == 5
    assert _admitted(queue, 8) == [("b", 4), ("c", 1)]
    assert queue.waiting == 0


def test_a_split_group_keeps_its_prefilled_prompt() -> None:
    group = _group("a", 6)
    queue = _queue(4, group)
    first = queue.admit(4)[0].group
    second = queue.admit(4)[0].group
    assert first is second is group


def test_slots_are_refilled_a_sixteenth_at_a_time_while_others_run() -> None:
    queue = _queue(64, _group("a", 100))
    assert _admitted(queue, 3) == []
    assert _admitted(queue, 4) == [("a", 4)]


def test_the_last_waiting_samples_do_not_wait_for_more_slots() -> None:
    queue = _queue(64, _group("a", 2))
    assert _admitted(queue, 1) == []
    assert _admitted(queue, 2) == [("a", 2)]


def test_removed_samples_never_enter() -> None:
    queue = _queue(8, _group("a", 2), _group("b", 2), _group("a", 1))
    assert len(queue.remove(lambda sample: sample.owner == "a")) == 3
    assert queue.waiting == 2
    assert _admitted(queue, 8) == [("b", 2)]


def test_prefill_batches_hold_similar_lengths_within_the_padded_budget() -> None:
    lengths = [9, 3, 8, 3, 20]
    batches = list(prefill_batches(lengths, 18))
    assert sorted(index for batch in batches for index in batch) == list(range(5))
    assert batches == [[1, 3], [2, 0], [4]]


def test_a_budget_of_zero_prefills_each_prompt_alone() -> None:
    assert list(prefill_batches([5, 5, 2], 0)) == [[2], [0], [1]]
