"""A lost or doubled prompt is found in the ledger and the dumps; an honest run is not accused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from services.reward.ledger.schema import ledger_file
from sluice.client.launcher import LaunchedProcess
from sluice.config.loading.loader import load_config
from tools.chaos.faults import Injector
from tools.chaos.observation import Observer
from tools.chaos.verdict import (
    Dump,
    LedgerView,
    TrainerRestart,
    doubled_prompts,
    lost_prompts,
    read_dumps,
    read_leases,
    read_ledger,
    returned_rows,
    surviving_steps,
)
from tools.launched_run import LaunchedRun

HONEST = {1: frozenset({"data-0", "data-1"}), 2: frozenset({"data-2", "witness-1"})}
PENDING, ENDED = frozenset({"data-3", "witness-2"}), {"witness-1": ("trained", 2)}
ACCEPTED = {"witness-1", "witness-2"}


def view(pending: frozenset[str], ended: dict[str, tuple[str, int | None]]) -> LedgerView:
    return LedgerView(pending, ended, low_water=3)


@pytest.mark.parametrize(
    ("ledger", "surviving", "last_step", "lost"),
    [
        pytest.param(view(PENDING, ENDED), HONEST, 2, set(), id="an honest run"),
        pytest.param(
            *(view(frozenset({"data-3"}), ENDED), HONEST, 2, {"witness-2"}),
            id="accepted, and neither ended nor pending",
        ),
        pytest.param(
            *(view(PENDING, {"witness-1": ("trained", 3)}), HONEST, 2, {"witness-1"}),
            id="trained in weights that are gone",
        ),
        pytest.param(
            *(view(PENDING, {"witness-1": ("trained", 1)}), HONEST, 2, {"witness-1"}),
            id="not in the batch of its step",
        ),
        pytest.param(
            *(view(PENDING, {"witness-1": ("trained", 3)}), {1: HONEST[1]}, 3, set()),
            id="a step without a dump accuses no prompt",
        ),
    ],
)
def test_lost_prompts_are_found(
    ledger: LedgerView, surviving: dict[int, frozenset[str]], last_step: int, lost: set[str]
) -> None:
    assert set(lost_prompts(surviving, ledger, ACCEPTED, last_step)) == lost


def test_a_prompt_in_two_surviving_steps_or_trained_and_pending_is_doubled() -> None:
    ledger = LedgerView(PENDING, ENDED)
    assert doubled_prompts(HONEST, ledger) == {}
    assert set(doubled_prompts({**HONEST, 3: frozenset({"data-1"})}, ledger)) == {"data-1"}
    assert set(doubled_prompts(HONEST, LedgerView(PENDING | {"data-0"}, ENDED))) == {"data-0"}


def test_a_batch_whose_weights_died_with_the_trainer_does_not_count() -> None:
    """Steps 3 and 4 die, step 3 comes again with others; what was in step 4 may come again."""
    dumps = [
        Dump(2, 10.0, {"a": 4}),
        Dump(3, 30.0, {"b": 4}),
        Dump(4, 12.0, {"c": 4}),
        Dump(5, 31.0, {"c": 3}),
        Dump(9, 32.0, {"z": 4}),
    ]
    kept = surviving_steps(dumps, [TrainerRestart(20.0, 2)], last_step=5)
    assert kept == {2: {"a": 4}, 3: {"b": 4}, 5: {"c": 3}}


def test_ledger_and_dumps_are_read_as_the_reward_service_writes_them(tmp_path: Path) -> None:
    database = ledger_file(tmp_path / "ledger.sqlite").open()
    database.execute("INSERT INTO pending VALUES ('data-3', 3, 3, x'00')")
    database.execute("INSERT INTO source_progress VALUES ('', 3)")
    database.execute("INSERT INTO ended_positions VALUES ('', 5)")
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
    ended = {"witness-1": ("trained", 2)}
    assert ledger == LedgerView(frozenset({"data-3"}), ended, 3, frozenset({5}))
    assert read_dumps(tmp_path) == [Dump(7, 50.0, {"data-0": 2, "data-1": 1})]


def test_the_ledger_of_a_killed_reward_service_shows_the_batch_that_got_no_dump(
    tmp_path: Path,
) -> None:
    run = SimpleNamespace(run_dir=tmp_path / "run")
    injector = Injector(cast("LaunchedRun", run), "no cable")
    database = ledger_file(tmp_path / "run" / "reward" / "ledger.sqlite").open()
    packed = msgspec.msgpack.encode(("data-1", "data-2"))
    database.execute("INSERT INTO lease VALUES (1, 'batch', 6, ?)", (packed,))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.kill()
        dead = LaunchedProcess("reward", process.pid, 0, is_draining=False)
        asyncio.run(injector._keep_ledger(dead))
    database.close()
    (batch,) = read_leases(injector.ledgers)
    assert (batch.step, batch.samples) == (7, {"data-1": 0, "data-2": 0})
    assert surviving_steps([batch], [], 7) == {7: batch.samples}


def test_a_copy_of_a_ledger_that_the_next_service_changed_meanwhile_shows_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "12.5").mkdir()
    (tmp_path / "12.5" / "ledger.sqlite").write_bytes(b"SQLite format 3\x00" + bytes(100))
    assert read_leases(tmp_path) == []


def row_line(name: str, step: int | None, end: str = "trained") -> dict[str, object]:
    return {"prompt_id": name, "end": end, "step": step}


def test_half_a_line_of_a_killed_service_is_left_out(tmp_path: Path) -> None:
    half, whole = '{"replicas": ["a"], "tok', '{"replicas": ["b"], "tokens": [2, 3]}'
    (tmp_path / "groups.jsonl").write_text(f"{half}{whole}\n{whole}\n", encoding="utf-8")
    ports = [f"sluice.{name}.endpoint.port=1" for name in ("trainer", "reward")]
    observer = Observer(load_config(None, [f"sluice.run_dir={tmp_path}", *ports]), tmp_path)
    observer.read_files()
    assert [(one.tokens, one.replicas) for one in observer.groups] == [(5, ("b",))]


ROWS = LedgerView(frozenset({"data-52"}), {}, 48, frozenset({48, 49}))
AGAIN = {4: {"data-39": 4}, 5: {"data-48": 4, "data-49": 4}}


@pytest.mark.parametrize(
    ("lines", "ledger", "lost"),
    [
        pytest.param([("data-40", 5)], ROWS, {"data-40"}, id="lost with the trainer"),
        pytest.param([("data-39", 4), ("data-48", 5)], ROWS, set(), id="in their batches"),
        pytest.param([("data-48", 4)], ROWS, set(), id="its last line died with its service"),
        pytest.param([("data-40", 3)], ROWS, set(), id="a step without a batch"),
        pytest.param([("data-40", 6)], ROWS, {"data-40"}, id="a step that never came again"),
        pytest.param([("data-40", None)], ROWS, set(), id="covered by a checkpoint"),
        pytest.param([("data-52", 5)], ROWS, set(), id="pending again"),
        pytest.param([("data-60", 5)], ROWS, set(), id="not yet issued again"),
        pytest.param(
            [("data-40", 5), ("data-40", None, "filtered_all_right")],
            *(ROWS, set()),
            id="filtered the next time",
        ),
    ],
)
def test_rows_that_were_lost_with_a_killed_trainer_are_found(
    lines: list, ledger: LedgerView, lost: set[str]
) -> None:
    rows = LedgerView(ledger.pending | {"data-50", "data-51"}, {}, 48, ledger.ended_above)
    found = lost_prompts(AGAIN, rows, (), 5, [row_line(*each) for each in lines])
    assert set(found) == lost


def test_a_row_before_a_pending_one_that_nothing_holds_is_lost() -> None:
    pending = frozenset({"data-2", "data-5", "witness-9"})
    ledger = LedgerView(pending, {}, 2, frozenset({3, 9}))  # 9 is of a trainer before
    assert set(lost_prompts({}, ledger, (), 1)) == {"data-4"}


@pytest.mark.parametrize(
    ("restarts", "lost"),
    [
        pytest.param([TrainerRestart(20.0, 1)], {"data-2", "data-7"}, id="step 2 died"),
        pytest.param([], {"data-2", "data-4", "data-5", "data-6", "data-7"}, id="no trainer died"),
    ],
)
def test_a_row_that_a_restarted_trainer_returned_to_the_data_set_is_not_lost(
    restarts: list[TrainerRestart], lost: set[str]
) -> None:
    batches = [Dump(1, 5.0, {"data-2": 4}), Dump(2, 10.0, {"data-4": 4, "data-6": 4})]
    lines = [row_line("data-2", 1), row_line("data-5", None, "filtered_all_right")]
    ledger = LedgerView(frozenset({"data-3", "data-8"}), {}, 2)
    surviving = surviving_steps(batches, restarts, 2)
    returned = returned_rows(batches, surviving, lines, restarts)
    assert set(lost_prompts({}, ledger, (), 2, (), returned)) == lost
