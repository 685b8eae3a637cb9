"""What a process holds when it is up does not slow down the collection of garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from sluice.concurrency.process import exempt_from_gc


class _Held:
    pass


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_a_collection_looks_only_through_what_came_after_the_start() -> None:
    before = _Held()
    exempt_from_gc()
    after = _Held()
    looked_through = {id(held) for held in gc.get_objects()}
    assert id(after) in looked_through
    assert id(before) not in looked_through
    assert gc.get_freeze_count() > 0


def test_cycles_that_came_after_the_start_are_still_freed() -> None:
    exempt_from_gc()
    one, other = _Held(), _Held()
    one.other, other.other = other, one  # type: ignore[attr-defined]
    seen = weakref.ref(one)
    del one, other
    gc.collect()
    assert seen() is None
