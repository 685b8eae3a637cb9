"""What is written in the background: nobody waits for it, and what is lost is counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import pytest

from sluice.concurrency.threads import BoundedWriter, WriteError

WAIT_S = 60.0
BATCH = 64


class Destination:
    """Takes batches; `before` runs first, in the writer's thread."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.before = before
        self.batches: list[list[int]] = []
        self.counted: list[int] = []
        self.arrived = threading.Semaphore(0)
        self.is_broken_off = threading.Event()

    def write(self, items: Sequence[int]) -> None:
        self.arrived.release()
        self.before()
        self.batches.append(list(items))

    def writer(self, max_waiting: int = 10_000, interval_s: float = 0.001) -> BoundedWriter[int]:
        return BoundedWriter(
            "lines",
            "somewhere",
            self.write,
            max_waiting=max_waiting,
            batch=BATCH,
            interval_s=interval_s,
            break_off=self.is_broken_off.set,
            count=self.counted.append,
        )


def _nobody_listens() -> None:
    raise WriteError("nobody listens")


def test_items_arrive_in_order_and_in_batches_and_the_last_ones_at_the_end() -> None:
    destination = Destination()
    writer = destination.writer(interval_s=3600)
    for number in range(150):
        writer.put(number)
    writer.close(WAIT_S)
    assert [number for batch in destination.batches for number in batch] == list(range(150))
    assert max(map(len, destination.batches)) <= BATCH
    assert (writer.num_written, writer.num_dropped, sum(destination.counted)) == (150, 0, 150)


def test_an_item_leaves_before_a_full_batch_is_there() -> None:
    destination = Destination()
    writer = destination.writer()
    writer.put(1)
    assert destination.arrived.acquire(timeout=WAIT_S)
    writer.close(WAIT_S)


def test_a_full_queue_drops_and_counts_and_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    proceed = threading.Event()
    destination = Destination(before=lambda: proceed.wait(WAIT_S))
    writer = destination.writer(max_waiting=10)
    writer.put(0)
    assert destination.arrived.acquire(timeout=WAIT_S)  # it hangs in the first write
    for number in range(25):
        writer.put(number)
    assert writer.num_dropped == 15
    proceed.set()
    writer.close(WAIT_S)
    assert writer.num_written == 11
    assert "15 lines never reached somewhere, 11 did" in caplog.text


def test_an_outage_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    destination = Destination(before=_nobody_listens)
    writer = destination.writer()
    for _ in range(3):
        writer.put(0)
        assert destination.arrived.acquire(timeout=WAIT_S)
    destination.before = lambda: None
    writer.put(1)
    writer.put(2)
    writer.close(WAIT_S)
    assert caplog.text.count("nobody listens") == 1
    assert caplog.text.count("again") == 1
    assert writer.num_dropped + writer.num_written == 5
    assert writer.num_written > 0


def test_a_write_that_hangs_is_broken_off_and_left() -> None:
    destination = Destination()
    destination.before = lambda: destination.is_broken_off.wait(WAIT_S)
    writer = destination.writer()
    writer.put(0)
    assert destination.arrived.acquire(timeout=WAIT_S)
    writer.close(0.2)
    assert destination.is_broken_off.is_set()


def test_after_a_failure_at_the_end_the_rest_is_given_up() -> None:
    destination = Destination(before=_nobody_listens)
    writer = destination.writer(interval_s=3600)
    for number in range(3 * BATCH):
        writer.put(number)
    writer.close(WAIT_S)
    assert destination.batches == []
    assert writer.num_written == 0


@pytest.mark.parametrize("error", [ValueError("odd"), UnicodeEncodeError("utf-8", "x", 0, 1, "no")])
def test_any_error_costs_its_batch_and_no_more(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [error]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    destination = Destination(before=fail_once)
    writer = destination.writer()
    for number in range(2):
        writer.put(number)
        assert destination.arrived.acquire(timeout=WAIT_S)
    writer.close(WAIT_S)
    assert (writer.num_dropped, writer.num_written) == (1, 1)
    assert sorted(destination.counted) == [-1, 1]
    assert caplog.text.count("lines do not reach somewhere") == 1


def test_a_batch_of_one_is_written_at_once() -> None:
    destination = Destination()
    writer = BoundedWriter[int](
        "lines", "somewhere", destination.write, max_waiting=2, batch=1, interval_s=3600
    )
    writer.put(1)
    assert destination.arrived.acquire(timeout=WAIT_S)
    writer.close(WAIT_S)


def test_with_sizes_the_bound_is_on_their_sum_and_one_item_always_waits() -> None:
    opened = threading.Event()
    destination = Destination(before=lambda: opened.wait(WAIT_S))
    writer = BoundedWriter(
        *("lines", "somewhere", destination.write),
        max_waiting=10,
        batch=1,
        interval_s=0.001,
        size=lambda item: item,
    )
    writer.put(1)
    assert destination.arrived.acquire(timeout=WAIT_S)  # the first one is being written
    for item in (99, 1, 2):
        writer.put(item)
    opened.set()
    writer.close(WAIT_S)
    assert destination.batches == [[1], [99]]
    assert writer.num_dropped == 2


def test_the_last_item_is_written_after_all_others_though_the_queue_is_full() -> None:
    opened = threading.Event()
    destination = Destination(before=lambda: opened.wait(WAIT_S))
    writer = BoundedWriter[int](
        "lines", "somewhere", destination.write, max_waiting=2, batch=1, interval_s=0.001
    )
    writer.put(1)
    assert destination.arrived.acquire(timeout=WAIT_S)  # being written
    for item in (2, 3, 4):
        writer.put(item)
    opened.set()
    writer.close(WAIT_S, last_item=9)
    assert destination.batches == [[1], [2], [3], [9]]


def test_a_write_that_fails_while_closing_is_the_last_one() -> None:
    closing = threading.Event()

    def fail() -> None:
        closing.wait(WAIT_S)
        raise OSError

    destination = Destination(before=fail)
    writer = BoundedWriter[int](
        "lines", "somewhere", destination.write, max_waiting=9, batch=1, interval_s=0.001,
        break_off=closing.set,
    )  # fmt: skip
    for item in (1, 2, 3):
        writer.put(item)
    writer.close(0.2)
    writer._thread.join(WAIT_S)
    assert writer.num_dropped == 1
