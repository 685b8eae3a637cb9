"""A lost or doubled prompt is found in the ledger and the dumps; an honest run is not accused."""

from __future__ import annotations

import json
import os
from pathlib import Path

from services.reward.ledger.schema import open_ledger_file
from tools.chaos.bookkeeping import (
    Dump,
    LedgerView,
    TrainerRestart,
    judge_accounting,
    read_dumps,
    read_ledger,
    surviving_steps,
)

HONEST = {1: frozenset({"data-0", "data-1"}), 2: frozenset({"data-2", "witness-1"})}
LEDGER = LedgerView(frozenset({"data-3", "witness-2"}), {"witness-1": ("trained", 2)})
ACCEPTED = {"witness-1", "witness-2"}


def test_a_run_that_trained_each_prompt_once_is_not_accused() -> None:
    verdict = judge_accounting(HONEST, LEDGER, ACCEPTED, last_step=2)
    assert (verdict.lost, verdict.doubled, verdict.unseen_steps) == ({}, {}, 0)


def test_an_accepted_prompt_that_neither_ended_nor_waits_is_lost() -> None:
    ledger = LedgerView(frozenset({"data-3"}), LEDGER.ended)
    assert set(judge_accounting(HONEST, ledger, ACCEPTED, last_step=2).lost) == {"witness-2"}


def test_a_prompt_that_was_trained_in_weights_that_are_gone_is_lost() -> None:
    ledger = LedgerView(LEDGER.pending, {"witness-1": ("trained", 3)})
    assert set(judge_accounting(HONEST, ledger, ACCEPTED, last_step=2).lost) == {"witness-1"}


def test_a_prompt_that_its_steps_batch_does_not_hold_is_lost() -> None:
    ledger = LedgerView(LEDGER.pending, {"witness-1": ("trained", 1)})
    assert set(judge_accounting(HONEST, ledger, ACCEPTED, last_step=2).lost) == {"witness-1"}


def test_a_step_whose_batch_was_not_seen_accuses_nobody() -> None:
    ledger = LedgerView(LEDGER.pending, {"witness-1": ("trained", 3)})
    verdict = judge_accounting({1: HONEST[1]}, ledger, ACCEPTED, last_step=3)
    assert (verdict.lost, verdict.unseen_steps) == ({}, 2)


def test_a_prompt_in_two_surviving_steps_is_doubled() -> None:
    steps = {**HONEST, 3: frozenset({"data-1"})}
    assert set(judge_accounting(steps, LEDGER, ACCEPTED, last_step=3).doubled) == {"data-1"}


def test_a_trained_prompt_that_waits_to_be_trained_again_is_doubled() -> None:
    ledger = LedgerView(LEDGER.pending | {"data-0"}, LEDGER.ended)
    assert set(judge_accounting(HONEST, ledger, ACCEPTED, last_step=2).doubled) == {"data-0"}


def test_a_batch_whose_weights_died_with_the_trainer_does_not_count() -> None:
    """Steps 3 and 4 die, step 3 comes again with others; what was in step 4 may come again."""
    dumps = [
        Dump(2, 10.0, frozenset({"a"})),
        Dump(3, 30.0, frozenset({"b"})),
        Dump(4, 12.0, frozenset({"c"})),
        Dump(5, 31.0, frozenset({"c"})),
        Dump(9, 32.0, frozenset({"z"})),
    ]
    kept = surviving_steps(dumps, [TrainerRestart(20.0, 2)], last_step=5)
    assert kept == {2: {"a"}, 3: {"b"}, 5: {"c"}}


def test_ledger_and_dumps_are_read_as_the_reward_service_writes_them(tmp_path: Path) -> None:
    database = open_ledger_file(tmp_path / "ledger.sqlite")
    database.execute("INSERT INTO pending VALUES ('data-3', 3, 3, x'00')")
    database.execute(
        "INSERT INTO ended (prompt_id, sequence, body, prompt_end, step, rewards, detail) "
        "VALUES ('witness-1', 1, x'00', 'trained', 2, x'00', '')"
    )
    database.close()
    rows = [
        {"uid": "data-0", "score": 1.0},
        {"uid": "data-0", "score": 0.0},
        {"uid": "data-1", "output": "a\u2028b\x85c"},
    ]
    lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows]
    (tmp_path / "7.jsonl").write_text("".join(lines), encoding="utf-8")
    os.utime(tmp_path / "7.jsonl", (50.0, 50.0))
    (tmp_path / ".8.jsonl.partial").write_text("{")

    ledger = read_ledger(tmp_path / "ledger.sqlite")
    assert ledger == LedgerView(frozenset({"data-3"}), {"witness-1": ("trained", 2)})
    assert read_dumps(tmp_path) == [Dump(7, 50.0, frozenset({"data-0", "data-1"}))]
