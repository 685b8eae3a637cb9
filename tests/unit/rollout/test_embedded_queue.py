"""Which samples enter which rows of the embedded engine."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from services.rollout.engines.embedded.batch_invariance import DecodeShapes
from services.rollout.engines.embedded.loop import PrefillQueue, PrefillUnit, prefill_batches
from services.rollout.engines.embedded.rows import RowTable, RunningSample
from services.rollout.engines.sampling import sample_keys, uniforms
from services.rollout.engines.threaded_engine import FlushPolicy
from tests.support.causal_lms import request


def _run(name: str) -> Any:
    """Stands for a request."""
    pace = FlushPolicy(every_token=False, interval_s=None)
    return SimpleNamespace(name=name, request=request(), pace=pace, images=None)


def _group(owner: str, samples: int, tokens: int = 3) -> PrefillUnit:
    prompt, run = np.arange(tokens), _run(owner)
    return PrefillUnit(
        prompt,
        deque(
            RunningSample(
                owner=run,
                sample_index=index,
                tokens=prompt,
                prompt_length=tokens,
                length_limit=tokens + 4,
                stop_ids=(),
                key=np.uint64(index),
            )
            for index in range(samples)
        ),
        run,
    )


def _queue(slots: int, *groups: PrefillUnit) -> PrefillQueue:
    queue = PrefillQueue(slots)
    for group in groups:
        queue.append(group)
    return queue


def _admitted(queue: PrefillQueue, free: int) -> list[tuple[object, int]]:
    return [(samples[0].owner.name, len(samples)) for _, samples in queue.admit(free)]


def test_groups_enter_in_order_of_arrival_and_only_the_first_is_split() -> None:
    queue = _queue(8, _group("a", 4), _group("b", 8), _group("c", 1))
    assert _admitted(queue, 8) == [("a", 4), ("b", 4)]
    assert queue.waiting == 5
    assert _admitted(queue, 8) == [("b", 4), ("c", 1)]
    assert queue.waiting == 0


def test_a_split_unit_keeps_its_prefilled_prompt() -> None:
    group = _group("a", 6)
    queue = _queue(4, group)
    first = queue.admit(4)[0][0]
    second = queue.admit(4)[0][0]
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
    assert len(queue.remove(lambda sample: sample.owner.name == "a")) == 3
    assert queue.waiting == 2
    assert _admitted(queue, 8) == [("b", 2)]


def test_prefill_batches_hold_similar_lengths_within_the_padded_budget() -> None:
    lengths = [9, 3, 8, 3, 20]
    batches = list(prefill_batches(lengths, 18))
    assert sorted(index for batch in batches for index in batch) == list(range(5))
    assert batches == [[1, 3], [2, 0], [4]]


def test_a_budget_of_zero_prefills_each_prompt_alone() -> None:
    assert list(prefill_batches([5, 5, 2], 0)) == [[2], [0], [1]]


def _sample(index: int, tokens: list[int], limit: int = 10, **changes: object) -> RunningSample:
    fields = {
        "owner": _run("me"),
        "sample_index": index,
        "tokens": np.array(tokens),
        "prompt_length": 2,
        "length_limit": limit,
        "stop_ids": (),
        "key": sample_keys(1, [index])[0],
    }
    return RunningSample(**(fields | changes))


def _table(*samples: RunningSample) -> RowTable:
    table = RowTable(4, 12)
    table.enter(samples)
    return table


def _record(table: RowTable, tokens: list[int]) -> tuple[list[bool], list[bool]]:
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    stopped, full = table.record(np.array(tokens), logprobs)
    return stopped.tolist(), full.tolist()


def test_rows_end_at_their_own_stop_tokens_and_limits() -> None:
    table = _table(
        _sample(0, [1, 2], stop_ids=(50,)),
        _sample(1, [1, 2], stop_ids=(60, 61, 62)),
        _sample(2, [1, 2], limit=4),
    )
    assert _record(table, [60, 50, 5]) == ([False] * 3, [False] * 3)
    assert _record(table, [50, 62, 5]) == ([True, True, False], [False, False, True])


def test_taken_tokens_are_the_response_tokens_not_taken_before() -> None:
    table = _table(_sample(0, [1, 2, 30]), _sample(1, [1, 2]))
    _record(table, [40, 50])
    assert table.take(0)[0].tolist() == [40]
    _record(table, [41, 51])
    assert table.take(0)[0].tolist() == [41]
    tokens, logprobs = table.take(1)
    assert (tokens.tolist(), logprobs.tolist()) == ([50, 51], [-1.0, -1.0])
    assert (tokens.dtype, logprobs.dtype) == (np.uint32, np.float32)


def test_closing_holes_moves_the_last_rows_with_all_they_have() -> None:
    table = _table(*[_sample(i, [1, 2], stop_ids=tuple(range(90, 90 + i))) for i in range(4)])
    _record(table, [10, 11, 12, 13])
    table.leave(0)
    table.leave(2)
    sources, targets = table.close_holes()
    assert (sources.tolist(), targets.tolist()) == ([3], [0])
    assert [s.sample_index for s in table.samples[:2] if s] == [3, 1]
    assert (table.rows, table.busy, table.free) == (2, 2, 2)
    assert _record(table, [92, 91])[0] == [True, False]
    assert table.take(0)[0].tolist() == [13, 92]


def test_new_samples_fill_holes_before_new_rows() -> None:
    table = _table(*[_sample(i, [1, 2]) for i in range(3)])
    table.leave(1)
    assert table.enter([_sample(7, [1, 2]), _sample(8, [1, 2])]).tolist() == [1, 3]
    assert table.close_holes()[0].size == 0


def test_random_numbers_follow_the_response_token_not_the_row() -> None:
    table = _table(_sample(0, [1, 2]), _sample(5, [1, 2, 3, 4]))
    expected = uniforms(sample_keys(1, [0, 5]), np.array([0, 2]))
    assert table.uniforms().tolist() == expected.tolist()


def test_a_padded_batch_feeds_token_zero_to_unused_rows() -> None:
    table = _table(_sample(0, [8, 9]), _sample(1, [8, 9, 7]))
    batch = table.batch(DecodeShapes((3, 4), (2, 6, 12)))
    assert batch.token_ids.tolist() == [9, 7, 0]
    assert batch.positions.tolist() == [1, 2, 0]
    assert batch.length == 6
