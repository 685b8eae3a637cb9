"""Accounting: the order of requests for counters, and counts of peers that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import pytest

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.accounting import RunAccountant, TokensAcrossRestarts
from services.trainer.loop.run_state import RunPhase, RunState
from sluice.algorithm.accounting import ReplicaCounters
from sluice.errors import DeadlineError, EngineError, NotReadyError, PeerError
from sluice.types import ReplicaInfo

AnswerT = TypeVar("AnswerT")


def load(
    generated: int, *, unsent: int = 0, running: int = 0, wall_s: float = 1.0
) -> ReplicaCounters:
    return ReplicaCounters(
        generated_tokens=generated,
        unsent_tokens=unsent,
        running_tokens=running,
        wall_seconds=wall_s,
        seconds_by_state={"idle": wall_s},
    )


def reported(**tokens: float) -> dict[str, float]:
    named = {f"reward/tokens/{name}": count for name, count in tokens.items()}
    return {**named, "reward/tokens/received": sum(tokens.values())}


class ScriptedCounters:
    """Accounting whose replicas and reward service answer by script; the last answer repeats."""

    def __init__(self) -> None:
        self.fleet, self.state = Fleet("layout", 1e9), RunState("t", 5, 0, elapsed_s=10.0)
        self.loads: dict[str, list[ReplicaCounters | Exception]] = {}
        self.reported: list[Mapping[str, float] | Exception] = [{}]
        self.wall_s = 10.0
        self.run_accounting = self._accountant()

    def restart(self) -> None:
        """Restart the trainer: its accounts begin at zero, its peers continue."""
        self.run_accounting = self._accountant(has_restarted=True)

    def _accountant(self, *, has_restarted: bool = False) -> RunAccountant:
        return RunAccountant(
            self.fleet,
            self.state,
            ask_replica=self.ask_replica,
            ask_reward=self.ask_reward,
            wall_s=lambda: self.wall_s,
            has_restarted=has_restarted,
        )

    def register(self, name: str, *loads: ReplicaCounters | Exception) -> ReplicaInfo:
        info = ReplicaInfo(name, f"{name}-1", f"{name}:1", 8)
        self.fleet.register(info, "layout", 0.0)
        self.loads[name] = list(loads)
        return info

    async def ask_replica(self, info: ReplicaInfo) -> ReplicaCounters:
        return _next(self.loads[info.name])

    async def ask_reward(self) -> Mapping[str, float]:
        return _next(self.reported)


def _next(answers: list[AnswerT | Exception]) -> AnswerT:
    answer = answers.pop(0) if len(answers) > 1 else answers[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def accounting(monkeypatch: pytest.MonkeyPatch) -> ScriptedCounters:
    monkeypatch.setattr("services.trainer.loop.accounting._PAUSE_S", 0.0)
    return ScriptedCounters()


async def test_there_are_three_accounts_and_status_calls_report_them(
    accounting: ScriptedCounters,
) -> None:
    accounting.register("a", load(100, unsent=10, running=20, wall_s=4.0))
    accounting.register("b", load(50, wall_s=2.0))
    accounting.reported = [reported(trained=90.0, pending=30.0)]
    named = await accounting.run_accounting.take()
    assert (named["generated_tokens"], named["tokens_residual"]) == (150, 0)
    assert (named["tokens/trained"], named["tokens/aborted"]) == (90, 10)
    assert (named["tokens/pending"], named["tokens/under_way"]) == (30, 20)
    assert (named["rollout_wall_s"], named["rollout_s/idle"]) == (6.0, 6.0)
    assert named["trainer_s/starting"] == pytest.approx(10.0, abs=1.0)
    assert {**accounting.state.accounts, "tokens_age_s": 0.0} == {**named, "tokens_age_s": 0.0}


async def test_the_fleet_is_asked_at_once_between_two_looks_at_the_reward_service(
    accounting: ScriptedCounters,
) -> None:
    asked, all_asked = list[str](), asyncio.Event()

    async def ask_replica(info: ReplicaInfo) -> ReplicaCounters:
        asked.append("replica")
        if asked.count("replica") == 2:
            all_asked.set()
        async with asyncio.timeout(60):
            await all_asked.wait()
        return load(1)

    async def ask_reward() -> Mapping[str, float]:
        asked.append("reward")
        return reported(pending=2.0)

    accounting.register("a")
    accounting.register("b")
    run_accounting = RunAccountant(
        accounting.fleet, accounting.state, ask_replica=ask_replica, ask_reward=ask_reward
    )
    await run_accounting.take()
    assert asked == ["reward", "replica", "replica", "reward"]


async def test_tokens_that_come_in_while_all_are_asked_are_not_in_the_residual(
    accounting: ScriptedCounters,
) -> None:
    accounting.register("a", load(100, running=20))
    accounting.reported = [reported(pending=70.0), reported(pending=95.0)]
    named = await accounting.run_accounting.take()
    assert (named["generated_tokens"], named["tokens/under_way"]) == (100, 5)
    assert (named["tokens_residual"], named["tokens_moved"]) == (0, 25)


async def test_tokens_that_were_lost_are_in_the_live_residual(accounting: ScriptedCounters) -> None:
    accounting.register("a", load(100, running=20))
    accounting.reported = [reported(pending=70.0)]
    named = await accounting.run_accounting.take()
    assert (named["tokens_residual"], named["tokens_residual_share"]) == (10, 0.1)


async def test_after_a_restart_of_trainer_and_reward_service_tokens_of_before_have_a_name(
    accounting: ScriptedCounters,
) -> None:
    accounting.restart()
    accounting.register("a", load(1000), load(1400))
    accounting.reported = [reported(pending=10.0)] * 3 + [reported(trained=400.0, pending=10.0)]
    first = await accounting.run_accounting.take()
    assert (first["tokens/before_restart"], first["tokens_residual"]) == (990, 0)
    later = await accounting.run_accounting.take()
    assert (later["tokens/before_restart"], later["tokens_residual"]) == (990, 0)


async def test_a_replica_that_finds_the_restarted_trainer_later_adds_to_what_was_before(
    accounting: ScriptedCounters,
) -> None:
    accounting.restart()
    accounting.reported = [reported(pending=10.0)]
    assert (await accounting.run_accounting.take())["tokens_residual"] == 0
    accounting.register("a", load(1000))
    named = await accounting.run_accounting.take()
    assert (named["tokens/before_restart"], named["tokens_residual"]) == (990, 0)


async def test_a_replica_that_registers_while_counters_are_read_is_in_the_next_reading(
    accounting: ScriptedCounters,
) -> None:
    num_asked = 0

    async def ask_reward() -> Mapping[str, float]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:  # the fleet was asked between the two
            accounting.register("a", load(1000))
        return reported(pending=10.0)

    accountant = RunAccountant(
        accounting.fleet,
        accounting.state,
        ask_replica=accounting.ask_replica,
        ask_reward=ask_reward,
        has_restarted=True,
    )
    await accountant.take()
    named = await accountant.take()
    assert (named["tokens/before_restart"], named["tokens_residual"]) == (990, 0)


@pytest.mark.parametrize(
    ("received", "at_the_end"),
    [
        pytest.param([10.0, 10.0, 10.0, 40.0], 1000, id="30 were on the wire"),
        pytest.param([10.0, 40.0, 40.0], 1030, id="30 came after the fleet had answered"),
    ],
)
async def test_tokens_under_way_at_a_restart_are_in_no_residual_at_the_end(
    accounting: ScriptedCounters, received: list[float], at_the_end: int
) -> None:
    accounting.restart()
    accounting.register("a", load(1000), load(at_the_end))
    accounting.reported = [reported(pending=tokens) for tokens in received]
    await accounting.run_accounting.take()
    named = await accounting.run_accounting.settle()
    assert (named["tokens/before_restart"], named["tokens_residual"]) == (at_the_end - 40, 0)


async def test_tokens_of_replicas_that_a_restarted_trainer_never_met_belong_to_the_total(
    accounting: ScriptedCounters,
) -> None:
    accounting.restart()
    accounting.register("a", load(100))
    accounting.reported = [reported(trained=600.0)]
    named = await accounting.run_accounting.take()
    assert (named["generated_tokens"], named["tokens_residual"]) == (600, 0)


async def test_a_restart_of_the_reward_service_alone_leaves_no_residual_either(
    accounting: ScriptedCounters,
) -> None:
    accounting.register("a", load(100), load(180))
    accounting.reported = [reported(trained=100.0)] * 2 + [reported(pending=30.0)]
    await accounting.run_accounting.take()
    named = await accounting.run_accounting.take()
    assert (named["tokens/before_restart"], named["tokens_residual"]) == (50, 0)


@pytest.mark.parametrize("received", [10.0, 1600.0])
async def test_a_restarted_trainer_that_trains_no_step_has_no_residual_at_its_end(
    accounting: ScriptedCounters, received: float
) -> None:
    accounting.restart()
    accounting.register("a", load(1000), load(1040))
    accounting.reported = [reported(trained=received)]
    named = await accounting.run_accounting.settle()
    assert named["tokens_residual"] == 0
    assert named.get("tokens/before_restart", 0) == max(1040 - received, 0)
    assert all(count >= 0 for name, count in named.items() if name.startswith("tokens/"))


async def test_tokens_on_the_wire_are_asked_for_once_more(accounting: ScriptedCounters) -> None:
    accounting.register("a", load(100))
    accounting.reported = [reported(pending=68.0), reported(pending=68.0), reported(pending=100.0)]
    assert (await accounting.run_accounting.take())["tokens_residual"] == 0


@pytest.mark.parametrize("silent", ["replica", "reward"])
async def test_while_somebody_is_silent_the_last_whole_account_of_tokens_stands_with_its_age(
    accounting: ScriptedCounters, silent: str
) -> None:
    error = PeerError("x", "asking", "")
    accounting.register("a", load(100), error if silent == "replica" else load(160, wall_s=2.0))
    later = error if silent == "reward" else reported(trained=160.0)
    accounting.reported = [reported(trained=100.0), reported(trained=100.0), later]
    await accounting.run_accounting.take()
    named = await accounting.run_accounting.take()
    assert (named["generated_tokens"], named["tokens/trained"]) == (100, 100)
    assert named["tokens_residual"] == 0
    assert named["tokens_age_s"] > 0
    first, second = (
        accounting.state.accounts["tokens_age_s"],
        accounting.state.accounts["tokens_age_s"],
    )
    assert named["tokens_age_s"] < first < second


async def test_who_hangs_holds_nobody_up_for_longer_than_a_take_may_last(
    accounting: ScriptedCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.loop.accounting._LONGEST_TAKE_S", 0.0)

    async def hang(_info: ReplicaInfo) -> ReplicaCounters:
        await asyncio.Event().wait()
        raise AssertionError

    accounting.register("a")
    accounting.reported = [reported(trained=0.0)]
    run_accounting = RunAccountant(
        accounting.fleet, accounting.state, ask_replica=hang, ask_reward=accounting.ask_reward
    )
    async with asyncio.timeout(60):
        named = await run_accounting.take()
    assert "rollout_seconds_residual" in named
    assert "tokens_residual" not in named


async def test_the_last_accounts_take_so_many_seconds_at_most(
    accounting: ScriptedCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.loop.accounting._LONGEST_SETTLE_S", 0.0)
    accounting.register("a", load(50), load(70), load(90), load(100))
    accounting.reported = [reported(trained=50.0), reported(trained=100.0)]
    named = await accounting.run_accounting.settle()
    assert (named["generated_tokens"], named["tokens/trained"]) == (70, 50)


async def test_the_reward_services_answers_are_taken_in_their_order(
    accounting: ScriptedCounters,
) -> None:
    """An older answer that came in later would look like a restarted service."""
    num_open, answers = 0, iter(range(1, 100))

    async def ask_reward() -> Mapping[str, float]:
        nonlocal num_open
        num_open += 1
        assert num_open == 1
        await asyncio.sleep(0)
        num_open -= 1
        return reported(trained=float(next(answers)))

    async def ask_replica(_info: ReplicaInfo) -> ReplicaCounters:
        return load(4)

    accounting.register("a")
    run_accounting = RunAccountant(
        accounting.fleet, accounting.state, ask_replica=ask_replica, ask_reward=ask_reward
    )
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(run_accounting.take())


@pytest.mark.parametrize(
    "error",
    [
        DeadlineError("a", "asking", 2.0),
        PeerError("a", "asking", ""),
        NotReadyError("the engine is not running"),
        EngineError("the engine broke"),
    ],
)
async def test_who_does_not_answer_stands_with_the_last_word(
    accounting: ScriptedCounters, error: Exception
) -> None:
    accounting.register("a", load(100), error)
    accounting.reported = [reported(trained=100.0), reported(trained=100.0), error]
    first = await accounting.run_accounting.take()
    second = await accounting.run_accounting.take()
    assert first["generated_tokens"] == second["generated_tokens"] == 100
    assert first["tokens/trained"] == second["tokens/trained"] == 100


async def test_without_token_counts_of_the_reward_service_there_is_no_such_account(
    accounting: ScriptedCounters,
) -> None:
    accounting.register("a", load(100))
    named = await accounting.run_accounting.settle()
    assert "tokens_residual" not in named
    assert "rollout_seconds_residual" in named


async def test_the_last_accounts_wait_until_every_sent_token_is_received(
    accounting: ScriptedCounters,
) -> None:
    accounting.register("a", load(50), load(70), load(90), load(100))
    accounting.reported = [reported(trained=50.0), reported(trained=90.0), reported(trained=100.0)]
    named = await accounting.run_accounting.settle()
    assert (named["generated_tokens"], named["tokens/trained"]) == (100, 100)
    assert named["tokens_residual"] == 0


async def test_of_accounts_that_never_agree_those_with_the_fewest_sent_tokens_stay(
    accounting: ScriptedCounters,
) -> None:
    """As when another client generates all the time."""
    sent = [(0, 30), (60, 70), (100, 140)]
    looks = [load(count, wall_s=float(count)) for pair in sent for count in pair]
    loads = [load(140 + 40 * i, wall_s=140.0 + i) for i in range(1, 20)]
    accounting.register("a", *looks, *loads)
    accounting.reported = [reported(trained=0.0)]
    assert (await accounting.run_accounting.settle())["generated_tokens"] == 70


async def test_the_closed_accounts_include_the_seconds_of_shutting_down(
    accounting: ScriptedCounters,
) -> None:
    accounting.reported = [reported(trained=0.0)]
    settled = await accounting.run_accounting.settle()
    accounting.state.enter(RunPhase.FINISHED)
    accounting.wall_s = 12.0
    closed = accounting.run_accounting.close({**settled, "submitted": 3.0})
    assert closed["trainer_wall_s"] == 12.0
    assert "trainer_s/finished" in closed
    assert closed["submitted"] == 3.0
    assert {n: v for n, v in closed.items() if n.startswith("rollout")} == {
        n: v for n, v in settled.items() if n.startswith("rollout")
    }


def test_counts_of_a_restarted_service_are_added_to_those_before() -> None:
    received = TokensAcrossRestarts()
    assert received.by_use() is None
    received.update({"reward/other": 1.0})
    assert received.by_use() is None
    received.update(reported(trained=10.0, pending=5.0, aborted=1.0))
    received.update(reported(trained=14.0, pending=7.0, aborted=1.0))
    received.update(reported(trained=2.0, pending=3.0))
    found = received.by_use()
    assert found is not None
    assert (found["trained"], found["aborted"], found["pending"]) == (16.0, 8.0, 3.0)
    assert sum(found.values()) == 22.0 + 5.0


def test_counters_of_replicas_that_left_stay_in_the_accounts() -> None:
    fleet = Fleet("layout", 6.0)
    for instance_id in ("a-1", "a-2"):
        info = ReplicaInfo("a", instance_id, "a:1", 8)
        fleet.register(info, "layout", 0.0)
        fleet.heartbeat("a", instance_id, load(10, running=4), draining=False, now_s=1.0)
    counters = fleet.counters()
    assert (counters.generated_tokens, counters.running_tokens) == (20, 4)
    assert counters.unsent_tokens == 4  # what the first instance had not sent
    assert counters.wall_seconds == 2.0
    fleet.expire(100.0)
    assert (fleet.counters().unsent_tokens, fleet.counters().running_tokens) == (8, 0)


def test_older_counters_do_not_replace_newer_ones() -> None:
    fleet, info = Fleet("layout", 6.0), ReplicaInfo("a", "a-1", "a:1", 8)
    fleet.register(info, "layout", 0.0)
    fleet.note_counters(info, load(30, wall_s=3.0))
    fleet.heartbeat("a", "a-1", load(20, wall_s=2.0), draining=False, now_s=1.0)
    assert fleet.counters().generated_tokens == 30
    assert fleet.members()[0].load.generated_tokens == 20
    fleet.note_counters(ReplicaInfo("b", "b-1", "b:1", 8), load(99))
    assert fleet.counters().generated_tokens == 30


def test_an_answer_does_not_keep_a_silent_replica_in_the_fleet() -> None:
    fleet, info = Fleet("layout", 6.0), ReplicaInfo("a", "a-1", "a:1", 8)
    fleet.register(info, "layout", 0.0)
    fleet.note_counters(info, load(30))
    fleet.expire(7.0)
    assert fleet.in_state(MemberState.PENDING) == ()
