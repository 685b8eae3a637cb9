"""Leases of samples outlive the reward service: their turns, ends and deadlines, and nothing of
prompts that have ended or start again."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.reward.__main__ import run_until_stopped
from services.reward.generation.request import GroupProgress, Purpose
from services.reward.groups.run import with_greedy
from services.reward.ledger.leases import CommittedTurn, LeaseRecord, PostedEnd
from services.reward.ledger.ledger import PromptLedger
from sluice.client.leases import LeasedSample
from sluice.errors import DataError, DeadlineError, NotReadyError, SluiceError
from sluice.types import (
    Answer,
    ChatMessage,
    EpisodeEnd,
    FailureKind,
    FinishReason,
    PromptEnd,
    RolloutGroup,
    Scored,
    Tool,
    ToolCall,
    Turn,
    VersionSpan,
)
from tests.support.leased import Leased, leased
from tests.support.scripted_environment import eventually, group_request, jar_policy, read_by
from tests.unit.reward.test_leased_episodes import ASKED, chat, failure_of, play, post, take

LATER = time.time() + 3600


def turn(tokens: list[int], **fields: Any) -> Turn:
    return Turn(
        np.array(tokens, np.uint32),
        np.full(len(tokens), -0.25, np.float32),
        (VersionSpan(3, 0, 1), VersionSpan(4, 1, len(tokens))),
        FinishReason.STOP,
        "said",
        **fields,
    )


CALLING = ChatMessage("assistant", "", (ToolCall("look", "{}", "call_0"),), reasoning="why")
PROMPT = np.array([1, 2], np.uint32)
READ = np.array([9], np.uint32)
TURNS = {
    "first": CommittedTurn(
        (ChatMessage("user", "Add."), CALLING),
        (Tool("look", "Look.", "{}"),),
        turn([5, 6, 7], answer=Answer("said", tool_calls=CALLING.tool_calls)),
        2,
        PROMPT,
    ),
    "second": CommittedTurn(
        (ChatMessage("tool", "7", tool_call_id="call_0"),),
        (),
        turn([8, 9], parent=0, context=READ),
        6,
        PROMPT,
    ),
}


def plain(record: LeaseRecord) -> Any:
    """A record as values that can be compared."""
    turns = [
        (
            (digest, one.messages, one.tools, one.num_read, one.prompt_token_ids.tolist()),
            (one.turn.token_ids.tolist(), one.turn.behavior_logprobs.tolist()),
            (one.turn.version_spans, one.turn.finish_reason, one.turn.text, one.turn.answer),
            (one.turn.parent, one.turn.context.tolist(), one.turn.is_new_root),
        )
        for digest, one in record.turns.items()
    ]
    sample = (record.lease_id, record.prompt_id, record.sample_index)
    holder = (record.holder, record.keep_alive_s)
    return (*sample, record.expires_s, record.end, record.limit, *holder, turns)


def opened(path: Path, *prompt_ids: str) -> PromptLedger:
    """A ledger in which these prompts are pending."""
    ledger = PromptLedger(path)
    for prompt_id in prompt_ids:
        if ledger.prompts.get(prompt_id) is None:
            prompt = replace(group_request().prompt, prompt_id=prompt_id)
            sequence = ledger.next_sequence()
            ledger.accept(replace(prompt, sequence=sequence, position=sequence))
    return ledger


def keep(ledger: PromptLedger, record: LeaseRecord) -> None:
    assert ledger.leases.add_lease(replace(record, turns={}, end=None, limit=None))
    for number, (digest, committed) in enumerate(record.turns.items()):
        ledger.leases.add_turn(record.lease_id, number, digest, committed)
    if record.limit is not None:
        ledger.leases.set_limit(record.lease_id, record.limit)
    if record.end is not None:
        ledger.leases.set_end(record.lease_id, record.end)


def test_a_ledger_opened_again_has_the_leases_with_their_turns_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    records = [
        LeaseRecord("new", "p0", 0, LATER, holder="runner", keep_alive_s=60.0),
        LeaseRecord("played", "p0", 1, LATER, TURNS),
        LeaseRecord("ended", "p1", 0, LATER, TURNS, PostedEnd(0.5)),
        LeaseRecord("failed", "p1", 1, LATER, {}, PostedEnd(None, "exit code 3")),
        LeaseRecord("full", "p1", 2, LATER, TURNS, None, EpisodeEnd.MAX_TURNS),
    ]
    with opened(path, "p0", "p1") as ledger:
        for record in records:
            keep(ledger, record)
    with PromptLedger(path) as ledger:
        assert [plain(one) for one in ledger.leases.restored] == [plain(one) for one in records]


def test_a_lease_that_cannot_be_read_costs_the_leases_of_its_prompt_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.sqlite"
    with opened(path, "p0", "p1") as ledger:
        for lease_id, prompt_id, index in (("a", "p0", 0), ("b", "p0", 1), ("c", "p1", 0)):
            keep(ledger, LeaseRecord(lease_id, prompt_id, index, LATER, TURNS, PostedEnd(1.0)))
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE lease_turns SET body = x'90' WHERE lease_id = 'b' AND turn = 1")
        database.commit()
    for _ in range(2):
        with PromptLedger(path) as ledger:
            assert [one.lease_id for one in ledger.leases.restored] == ["c"]
            assert ledger.num_pending == 2
    (warned,) = caplog.messages
    assert "a lease of prompt p0 cannot be read" in warned


def test_a_lease_keeps_the_prompt_of_its_group_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    prompt = np.arange(8000, dtype=np.uint32)
    turns = {str(n): replace(TURNS["second"], prompt_token_ids=prompt) for n in range(10)}
    with opened(path, "p0") as ledger:
        keep(ledger, LeaseRecord("one", "p0", 0, LATER, turns))
    with closing(sqlite3.connect(path)) as database:
        (size,) = database.execute("SELECT sum(length(body)) FROM lease_turns").fetchone()
    assert size < 10 * 500
    with PromptLedger(path) as ledger:
        (record,) = ledger.leases.restored
        assert all((one.prompt_token_ids == prompt).all() for one in record.turns.values())


@pytest.mark.parametrize(
    ("leave", "left"),
    [
        (lambda ledger: ledger.end("p0", PromptEnd.TRAINED), ["other"]),
        (lambda ledger: ledger.leases.revoke("p0"), ["other"]),
        (lambda ledger: ledger.forget_data(), []),
        (lambda ledger: ledger.begin_trainer("another", 0), []),
        (
            lambda ledger: keep(ledger, LeaseRecord("again", "p0", 1, LATER, TURNS)),
            ["again", "first", "other"],
        ),
    ],
)
def test_leases_leave_with_their_prompt_its_attempt_or_its_trainer(
    tmp_path: Path, leave: Callable[[PromptLedger], None], left: list[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    revoked: list[str] = []
    with opened(path, "p0", "p1") as ledger:
        keep(ledger, LeaseRecord("first", "p0", 0, LATER, TURNS))
        keep(ledger, LeaseRecord("second", "p0", 1, LATER, TURNS))
        keep(ledger, LeaseRecord("other", "p1", 0, LATER, TURNS))
        ledger.leases.on_revoked = revoked.append
        leave(ledger)
    with PromptLedger(path) as ledger:
        assert sorted(one.lease_id for one in ledger.leases.restored) == left
        assert all(len(one.turns) == 2 for one in ledger.leases.restored)
    assert ("p0" in revoked) == ("first" not in left)
    assert ("p1" in revoked) == ("other" not in left)


def test_a_sample_whose_prompt_the_ledger_does_not_know_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "ledger.sqlite", "p0") as ledger:
        assert not ledger.leases.add_lease(LeaseRecord("one", "validation-0", 0, LATER))


@asynccontextmanager
async def service(folder: Path, life: int, **limits: Any) -> AsyncIterator[Leased]:
    """One life of a service whose ledger survives it."""
    own = folder / str(life)
    own.mkdir()
    with opened(folder / "ledger.sqlite", "p0") as ledger:
        async with leased(own, jar_policy("C"), ledger=ledger, **limits) as run:
            yield run


@asynccontextmanager
async def dying(run: Leased, n: int = 2) -> AsyncIterator[None]:
    """A group under way that dies with its service at the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        generating = tasks.create_task(generated(run, n))
        yield
        generating.cancel()


async def generated(run: Leased, n: int, progress: GroupProgress | None = None) -> RolloutGroup:
    return await run.generator.generate(group_request(n, progress=progress))


async def test_a_lease_continues_its_exact_tokens_and_a_sample_nobody_had_is_offered(
    tmp_path: Path,
) -> None:
    async with service(tmp_path, 0) as run, dying(run):
        (lease,) = await take(run, 1)
        before = await chat(run, lease.lease_id, ASKED)
        sampled = run.engine.sampled[0]
    progress = GroupProgress()
    versions: list[int | None] = []
    progress.on_oldest_version = versions.append
    async with service(tmp_path, 1) as run, asyncio.TaskGroup() as tasks:
        # Its prompt has not started again.
        again = await chat(run, lease.lease_id, ASKED)
        assert json.dumps(again["choices"]) == json.dumps(before["choices"])
        assert again["usage"] == before["usage"]
        assert run.engine.prompts == []
        group = tasks.create_task(generated(run, 2, progress))
        assert "7" in await play(run, lease.lease_id, 1.0)
        (other,) = await take(run, 1)
        assert other.sample_index != lease.sample_index
        assert other.lease_id != lease.lease_id
        await play(run, other.lease_id, 0.0)
        restored = await group
        prompts = run.engine.prompts
        assert run.desk.num_recalled_tokens == len(sampled)
        assert (run.desk.num_offered, run.desk.num_leased) == (0, 0)
    rollout = restored.rollouts[lease.sample_index]
    assert rollout.outcome == Scored(1.0, 1.0, {"acc": 1.0})
    assert rollout.turns[0].token_ids.tolist() == sampled
    assert [one.parent for one in rollout.turns] == [None, 0]
    # One of its turns and both of its sibling's were sampled in this life.
    assert len(prompts) == 3
    assert read_by(restored.prompt_token_ids, rollout, 1) in prompts
    assert not rollout.turns[0].is_new_root
    assert versions[0] == 3
    assert progress.num_received == sum(one.num_tokens for one in restored.rollouts)


async def test_only_samples_that_are_trained_survive_and_no_other_continues_from_them(
    tmp_path: Path,
) -> None:
    request = group_request(1)
    validation = replace(request, purpose=Purpose.VALIDATION)
    async with service(tmp_path, 0) as run, asyncio.TaskGroup() as tasks:
        trained = tasks.create_task(run.generator.generate(request))
        (lease,) = await take(run, 1)
        await chat(run, lease.lease_id, ASKED)
        validated = tasks.create_task(run.generator.generate(validation))
        (other,) = await take(run, 1)
        await chat(run, other.lease_id, ASKED)
        trained.cancel()
        validated.cancel()
    async with service(tmp_path, 1) as run, asyncio.TaskGroup() as tasks:
        validated = tasks.create_task(run.generator.generate(validation))
        (other,) = await take(run, 1)
        await play(run, other.lease_id, 0.0)
        assert (await validated).rollouts[0].outcome == Scored(0.0, 0.0, {"acc": 0.0})
        assert len(run.engine.prompts) == 2
        trained = tasks.create_task(run.generator.generate(request))
        await play(run, lease.lease_id, 1.0)
        assert (await trained).rollouts[0].outcome == Scored(1.0, 1.0, {"acc": 1.0})


async def test_a_greedy_response_never_takes_the_place_of_a_sample(tmp_path: Path) -> None:
    request = group_request(1)
    greedy = replace(request.sampling, temperature=0.0)
    rewards = []
    async with service(tmp_path, 0) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(with_greedy(run.generator, request, greedy))
        first, second = await take(run, 2)
        await play(run, first.lease_id, 0.25)
        await play(run, second.lease_id, 1.0)
        samples, _ = await group
        rewards.append(samples.rollouts[0].outcome)
    async with service(tmp_path, 1) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(with_greedy(run.generator, request, greedy))
        (again,) = await take(run, 1)
        await play(run, again.lease_id, 0.5)
        samples, response = await group
        rewards.append(samples.rollouts[0].outcome)
        assert response.rollouts[0].outcome == Scored(0.5, 0.5, {"acc": 0.5})
    assert rewards[0] == rewards[1]


async def test_a_request_that_waits_for_its_prompt_to_start_again_is_answered_then(
    tmp_path: Path,
) -> None:
    async with service(tmp_path, 0) as run, dying(run, 1):
        (lease,) = await take(run, 1)
    async with service(tmp_path, 1) as run, asyncio.TaskGroup() as tasks:
        playing = tasks.create_task(play(run, lease.lease_id, 0.5))
        await asyncio.sleep(0.05)
        group = tasks.create_task(generated(run, 1))
        assert await playing == "Answer: 7"
        assert (await group).rollouts[0].outcome == Scored(0.5, 0.5, {"acc": 0.5})


async def test_a_sample_whose_end_was_posted_needs_no_program(tmp_path: Path) -> None:
    async with service(tmp_path, 0) as run, dying(run):
        first, second = await take(run, 2)
        await play(run, first.lease_id, 1.0)
        await chat(run, second.lease_id, ASKED)
        assert (await post(run, f"/s/{second.lease_id}/end", failure="exit code 3"))[0] == 200
    async with service(tmp_path, 1) as run:
        assert (await post(run, f"/s/{first.lease_id}/end", reward=1.0))[0] == 200
        assert (await post(run, f"/s/{first.lease_id}/end", reward=0.0))[0] == 409
        restored = await generated(run, 2)
        assert run.engine.prompts == []
        assert run.generator.notes.tool_names == {"look"}
        assert (run.desk.num_offered, run.desk.num_leased) == (0, 0)
    ended = restored.rollouts[first.sample_index]
    assert (ended.outcome, len(ended.turns)) == (Scored(1.0, 1.0, {"acc": 1.0}), 2)
    failed = failure_of(restored.rollouts[second.sample_index])
    assert (failed.kind, failed.detail) == (FailureKind.AGENT, "exit code 3")


@pytest.mark.parametrize("is_posted_before", [True, False])
async def test_a_failure_of_a_program_at_its_limit_lets_scorers_grade_also_after_a_restart(
    tmp_path: Path, is_posted_before: bool
) -> None:
    async def fail(run: Leased) -> None:
        assert (await post(run, f"/s/{lease.lease_id}/end", failure="no answer"))[0] == 200

    async with service(tmp_path, 0, max_assistant_turns=1) as run, dying(run, 1):
        (lease,) = await take(run, 1)
        said = (await chat(run, lease.lease_id, ASKED))["choices"][0]["message"]
        more = [*ASKED, said, {"role": "user", "content": "And?"}]
        path = f"/s/{lease.lease_id}/v1/chat/completions"
        assert (await post(run, path, model="any", messages=more))[0] == 400
        if is_posted_before:
            await fail(run)
    async with service(tmp_path, 1, max_assistant_turns=1) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        await fail(run)
        (restored,) = (await group).rollouts
        assert (restored.outcome, restored.end) == (None, EpisodeEnd.MAX_TURNS)
        assert run.engine.prompts == []


async def test_a_lease_that_expired_meanwhile_fails_and_takes_nothing_more(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async with service(tmp_path, 0, timeout_s=600.0) as run, dying(run, 1):
        (lease,) = await take(run, 1)
        await chat(run, lease.lease_id, ASKED)
    skip_time(600.0)
    async with service(tmp_path, 1) as run:
        path = f"/s/{lease.lease_id}/v1/chat/completions"
        assert (await post(run, path, model="any", messages=ASKED))[0] == 410
        assert (await post(run, f"/s/{lease.lease_id}/end", reward=1.0))[0] == 410
        failed = failure_of((await generated(run, 1)).rollouts[0])
    assert failed.kind is FailureKind.AGENT
    assert "seconds had passed" in failed.detail


async def test_after_a_restart_a_runner_has_its_time_again_and_its_samples_fail_without_it(
    tmp_path: Path, skip_time: Callable[[float], None]
) -> None:
    async with service(tmp_path, 0) as run, dying(run, 2):
        runner, offered = run.client.leases(), run.desk
        await eventually(lambda: offered.num_offered == 2)
        lives, left = await runner.take(2, 60.0, keep_alive_s=600.0)
    assert {lives.sample_index, left.sample_index} == {0, 1}
    async with service(tmp_path, 1) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 2))
        await play(run, lives.lease_id, 1.0)
        assert not group.done()
        skip_time(600.0)
        restored = await group
    assert restored.rollouts[lives.sample_index].outcome == Scored(1.0, 1.0, {"acc": 1.0})
    failed = failure_of(restored.rollouts[left.sample_index])
    assert (failed.kind, failed.detail[:15]) == (FailureKind.AGENT, "its runner left")


async def test_a_prompt_that_ends_before_it_starts_again_revokes_its_leases(tmp_path: Path) -> None:
    async with service(tmp_path, 0) as run, dying(run, 1):
        (lease,) = await take(run, 1)
    (tmp_path / "1").mkdir()
    with PromptLedger(tmp_path / "ledger.sqlite") as ledger:
        async with (
            leased(tmp_path / "1", jar_policy("C"), ledger=ledger) as run,
            asyncio.TaskGroup() as tasks,
        ):
            path = f"/s/{lease.lease_id}/v1/chat/completions"
            waiting = tasks.create_task(post(run, path, model="any", messages=ASKED))
            await asyncio.sleep(0.05)
            ledger.end("p0", PromptEnd.DROPPED_STALE)
            assert (await waiting)[0] == 410
            assert run.desk.num_leased == 0


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_sample_whose_lease_no_program_got_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    committing = asyncio.Event()

    async def durable(_ledger: PromptLedger, _number: int | None = None) -> None:
        committing.set()
        if not is_cancelled:
            raise DeadlineError("disk of the ledger", "committing changes", 30)
        await asyncio.Event().wait()

    async with service(tmp_path, 0) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        await eventually(lambda: run.desk.num_offered == 1)
        with monkeypatch.context() as patch:
            patch.setattr(PromptLedger, "durable", durable)
            taking = tasks.create_task(lost(run))
            await committing.wait()
            if is_cancelled:
                assert (run.desk.num_offered, run.desk.num_leased) == (0, 1)
                taking.cancel()
            await eventually(lambda: run.desk.num_offered == 1)
            assert run.desk.num_leased == 0
            await asyncio.wait([taking])
        (lease,) = await take(run, 1)
        await play(run, lease.lease_id, 1.0)
        assert (await group).rollouts[0].outcome == Scored(1.0, 1.0, {"acc": 1.0})


async def lost(run: Leased) -> Sequence[LeasedSample]:
    """Take a sample whose response may not come."""
    with suppress(SluiceError):
        return await run.client.leases().take(1, 60.0)
    return ()


@pytest.mark.parametrize("is_durable", [True, False])
async def test_a_group_given_up_while_its_lease_is_committed_fails_no_call_of_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    committing, may_answer = asyncio.Event(), asyncio.Event()

    async def durable(_ledger: PromptLedger, _number: int | None = None) -> None:
        committing.set()
        await may_answer.wait()
        if not is_durable:
            raise DeadlineError("disk of the ledger", "committing changes", 30)

    async with service(tmp_path, 0) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        await eventually(lambda: run.desk.num_offered == 1)
        with monkeypatch.context() as patch:
            patch.setattr(PromptLedger, "durable", durable)
            taking = tasks.create_task(lost(run))
            await committing.wait()
            group.cancel()
            await asyncio.wait([group])
            may_answer.set()
            leases = await taking
        assert len(leases) == is_durable
        assert run.desk.num_offered == 0
        assert await run.client.leases().take(1, 0.1) == []


async def test_a_lease_whose_group_the_service_cancels_at_its_end_is_refused_only_for_now(
    tmp_path: Path,
) -> None:
    async with service(tmp_path, 0) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 2))
        ended, lease = await take(run, 2)
        assert (await post(run, f"/s/{ended.lease_id}/end", failure="exit code 3"))[0] == 200
        said = (await chat(run, lease.lease_id, ASKED))["choices"][0]["message"]
        group.cancel()
        await asyncio.wait([group])
        path = f"/s/{lease.lease_id}/v1/chat/completions"
        asking = tasks.create_task(post(run, path, model="any", messages=[*ASKED, said]))
        again = f"/s/{ended.lease_id}/end"
        assert (await post(run, again, failure="exit code 3"))[0] == 200
        assert not asking.done()
        run.desk.close()
        assert (await asking)[0] == 503


async def test_a_service_that_an_error_ends_refuses_programs_only_for_now() -> None:
    ended: list[str] = []

    async def failure() -> DataError:
        return DataError("the disk is full")

    loop = SimpleNamespace(run=asyncio.Event().wait)
    app: Any = SimpleNamespace(loop=loop, end=lambda: ended.append("app"))
    ledger: Any = SimpleNamespace(has_file=True, failure=failure)
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await run_until_stopped(app, asyncio.Event(), ledger)
    assert ended == ["app"]


async def test_a_service_that_ends_leases_nothing_more(tmp_path: Path) -> None:
    async with leased(tmp_path, jar_policy("C")) as run, asyncio.TaskGroup() as tasks:

        async def taking() -> None:
            with pytest.raises(NotReadyError):
                async with run.desk.leasing(1, 600.0):
                    pass

        waiting = tasks.create_task(taking())
        await asyncio.sleep(0)
        run.desk.close()
        async with asyncio.timeout(60):
            await waiting
        group = tasks.create_task(generated(run, 1))
        await eventually(lambda: run.desk.num_offered == 1)
        await taking()
        assert run.desk.num_offered == 1
        group.cancel()


async def test_a_service_that_ends_in_order_refuses_programs_only_until_the_next_one(
    tmp_path: Path,
) -> None:
    async with service(tmp_path, 0) as run, dying(run, 1):
        (lease,) = await take(run, 1)
        said = (await chat(run, lease.lease_id, ASKED))["choices"][0]["message"]
        path = f"/s/{lease.lease_id}/v1/chat/completions"
        run.desk.close()
        assert (await post(run, path, model="any", messages=[*ASKED, said]))[0] == 503
        assert (await post(run, f"/s/{lease.lease_id}/end", reward=1.0))[0] == 503
    async with service(tmp_path, 1) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(generated(run, 1))
        await play(run, lease.lease_id, 1.0)
        assert len((await group).rollouts[0].turns) == 2
        await eventually(lambda: run.desk.num_leased == 0)
