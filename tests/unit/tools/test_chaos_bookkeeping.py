"""A lost or doubled prompt is found in the ledger and the dumps; an honest run is not accused."""

from __future__ import annotations

import asyncio
import json
import os
import time
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest

from services.reward.ledger.schema import open_ledger_file
from tools.chaos.faults import SINGLE, Injected, Injector, single_faults
from tools.chaos.verdict import (
    Dump,
    LedgerView,
    TrainerRestart,
    Yield,
    doubled_prompts,
    lost_prompts,
    read_dumps,
    read_ledger,
    recovered_s,
    surviving_steps,
)

HONEST = {1: frozenset({"data-0", "data-1"}), 2: frozenset({"data-2", "witness-1"})}
PENDING, ENDED = frozenset({"data-3", "witness-2"}), {"witness-1": ("trained", 2)}
ACCEPTED = {"witness-1", "witness-2"}


@pytest.mark.parametrize(
    ("ledger", "surviving", "last_step", "lost"),
    [
        pytest.param(LedgerView(PENDING, ENDED), HONEST, 2, set(), id="an honest run"),
        pytest.param(
            *(LedgerView(frozenset({"data-3"}), ENDED), HONEST, 2, {"witness-2"}),
            id="accepted, and neither ended nor pending",
        ),
        pytest.param(
            *(LedgerView(PENDING, {"witness-1": ("trained", 3)}), HONEST, 2, {"witness-1"}),
            id="trained in weights that are gone",
        ),
        pytest.param(
            *(LedgerView(PENDING, {"witness-1": ("trained", 1)}), HONEST, 2, {"witness-1"}),
            id="not in the batch of its step",
        ),
        pytest.param(
            *(LedgerView(PENDING, {"witness-1": ("trained", 3)}), {1: HONEST[1]}, 3, set()),
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


def test_throughput_recovers_at_the_first_window_with_nearly_the_full_rate() -> None:
    slow = [Yield(at_s, 10.0) for at_s in (1.0, 2.0, 3.0)]
    fast = [Yield(at_s, 100.0) for at_s in (4.0, 5.0, 6.0, 7.0)]

    def found(end_s: float) -> float | None:
        yields = [*slow, *fast]
        return recovered_s(yields, 0.5, full_rate=100.0, window_s=2.0, end_s=end_s)

    assert found(8.0) == 4.0
    assert found(5.5) is None


def test_a_run_that_ended_no_group_before_its_faults_does_not_count_as_recovered() -> None:
    assert recovered_s([], 0.0, full_rate=0.0, window_s=2.0, end_s=8.0) is None


def test_single_faults_are_of_every_kind_in_each_round() -> None:
    kinds = [fault.kind for fault in islice(single_faults(3), 2 * len(SINGLE))]
    assert sorted(kinds[: len(SINGLE)]) == sorted(kinds[len(SINGLE) :]) == sorted(SINGLE)
    assert [one.kind for one in islice(single_faults(3), 16)] == kinds


def test_single_faults_are_of_the_chosen_kinds() -> None:
    kinds = ("kill_reward", "kill_trainer")
    found = [fault.kind for fault in islice(single_faults(3, kinds), 4)]
    assert sorted(found[:2]) == sorted(found[2:]) == sorted(kinds)


def test_a_single_fault_waits_for_the_recovery_from_the_one_before() -> None:
    injector, seen = Injector(mock.Mock(), "no cable"), list[str]()

    async def recover(injected: Injected) -> None:
        seen.append(f"recovering from {injected.fault.kind}")
        await asyncio.sleep(0)
        seen.append("recovered")

    async def inject(fault: object, _: asyncio.TaskGroup) -> str:
        seen.append("fault")
        return "rollout-0"

    kills = [one for one in islice(single_faults(0), 16) if one.kind == "kill_replica"]
    with mock.patch.object(Injector, "_inject", side_effect=inject):
        asyncio.run(injector.follow_singly(kills, recover, until_s=time.monotonic() + 60.0))
    assert seen == 2 * ["fault", "recovering from kill_replica", "recovered"]
    assert [one.target for one in injector.done] == ["rollout-0", "rollout-0"]
