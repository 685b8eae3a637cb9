"""What the rendezvous store remembers, and its bounds."""

from __future__ import annotations

import pytest

from sluice.weights import store
from sluice.weights.store import (
    Action,
    Add,
    Delete,
    KeyTable,
    Read,
    StoreAnswer,
    StoreQuestion,
    Write,
)


def _table(epoch: int = 1) -> KeyTable:
    table = KeyTable()
    table.begin(epoch)
    return table


def _do(table: KeyTable, action: Action, epoch: int = 1) -> StoreAnswer:
    return table.answer(StoreQuestion(epoch, action))


def test_nothing_can_be_asked_before_an_epoch_began() -> None:
    refusal = KeyTable().answer(StoreQuestion(1, Read(("a",)))).refusal
    assert refusal == "epoch 1 is not open: none has begun"


def test_an_epoch_forgets_the_keys_of_the_one_before_and_refuses_its_late_members() -> None:
    table = _table(1)
    _do(table, Write("a", b"old"))
    table.begin(2)
    assert _do(table, Read(("a",)), epoch=2) == StoreAnswer((None,))
    assert _do(table, Write("a", b"late"), epoch=1).refusal == (
        "epoch 1 is not open: the store is at 2"
    )
    assert _do(table, Read(("a",)), epoch=2) == StoreAnswer((None,))


def test_a_full_table_refuses_more_keys_and_still_takes_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "MAX_KEYS", 2)
    table = _table()
    for key in ("a", "b"):
        assert _do(table, Write(key, b"1")).refusal is None
    assert "the store is full: 3 keys" in (_do(table, Write("c", b"1")).refusal or "")
    assert "the store is full" in (_do(table, Add("c", 1)).refusal or "")
    assert _do(table, Write("a", b"2")).refusal is None
    assert _do(table, Read(("a", "b", "c"))) == StoreAnswer((b"2", b"1", None))
    _do(table, Delete("a"))
    assert _do(table, Write("c", b"1")).refusal is None


def test_the_bytes_of_all_keys_and_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_TABLE_BYTES", 10)
    table = _table()
    assert _do(table, Write("a", b"x" * 9)).refusal is None
    assert "11 bytes" in (_do(table, Write("a", b"x" * 10)).refusal or "")
    assert _do(table, Write("a", b"x")).refusal is None
    assert _do(table, Write("b", b"x" * 7)).refusal is None
    assert _do(table, Delete("b")).values == (b"x" * 7,)
    assert _do(table, Write("c", b"x" * 7)).refusal is None


def test_what_is_no_number_cannot_be_added_to() -> None:
    table = _table()
    _do(table, Write("a", b"text"))
    assert _do(table, Add("a", 1)).refusal == "b'text' is no number to add to"
