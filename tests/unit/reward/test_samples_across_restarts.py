"""Saved samples of groups that start again, end in between or are taken up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.reward.app import LEDGER_FILE, RewardLoop, open_run_files
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.queue import Priority, ReplicaQueue
from services.reward.generation.request import (
    GenerateEvent,
    GroupBudget,
    GroupRequest,
    ReceivedSamples,
    request_digest,
)
from services.reward.ledger.content import SamplePart, SampleParts, decode_samples, encode_parts
from services.reward.ledger.sqlite import SqliteLedger
from sluice.algorithm.groups.stragglers import StragglerRules
from sluice.algorithm.growing_sample import GrowingSample, NewTokens
from sluice.config.run import RunConfig
from sluice.types import (
    DataProgress,
    FinishReason,
    Prompt,
    PromptOrigin,
    ReplicaInfo,
    Rollout,
    SamplingParams,
)
from tests.support.client_prompt import client_prompt
from tests.support.reward_loop import (
    InlineScorer,
    ScriptedClient,
    replica,
    running_loop,
    settled,
    submit,
)
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

SAMPLING = SamplingParams(1.0, 1.0, -1, 64, 7)


def config(run_dir: Path, samples: int = 2) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": samples}},
        "sluice": {
            "run_dir": str(run_dir),
            "asynchrony": {"max_staleness": 1},
            "reward": {"group_log": False, "ledger_samples_interval_s": 3600},
        },
    }
    return msgspec.convert(tree, RunConfig)


@asynccontextmanager
async def service(rules: RunConfig, client: ScriptedClient) -> AsyncIterator[RewardLoop]:
    """One life of a service over the run's files; samples are saved when the test says so."""
    with open_run_files(rules) as files:
        async with running_loop(rules, client, files=files) as loop:
            yield loop


@dataclass
class GrowingClient(ScriptedClient):
    """Sends `grows` tokens of each sample, and the whole sample of some more once it may end."""

    grows: int = 50
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    unwinds: asyncio.Event | None = None

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout] = (),
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append((replica.name, request.prompt.prompt_id, tuple(sample_indexes)))
        yield GenerateEvent((PROMPT_TOKENS, 0), ())
        held = {partial.sample_index: partial for partial in partials}
        samples = {index: GrowingSample() for index in sample_indexes}
        for index, sample in samples.items():
            if index in held:
                sample.adopt(held[index])
            new = np.arange(self.grows, dtype=np.uint32)
            sample.append(new, -new.astype(np.float32), 0)
            if new.size:
                yield GenerateEvent(None, (), (NewTokens(index, new, -new.astype(np.float32), 0),))
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.prompt.prompt_id)
            if self.unwinds is not None:
                await self.unwinds.wait()
            raise
        ended = [s.rollout(i, FinishReason.STOP, "Answer: 1") for i, s in samples.items()]
        yield GenerateEvent(None, tuple(ended))


def received(loop: RewardLoop) -> float:
    return loop.statistics()["reward/tokens/received"]


async def test_a_group_that_starts_again_as_stale_leaves_no_tokens_that_follow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_scorer: InlineScorer, _items: Sequence[Any]) -> tuple[Any, ...]:
        return await asyncio.Future()

    monkeypatch.setattr(InlineScorer, "score", never)
    client = GrowingClient()
    async with service(config(tmp_path), client) as loop:
        submit(loop, ["first"])
        await loop.pipeline.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: received(loop) == 100)
        await loop.samples.save()
        assert loop.ledger.saved_bytes
        client.may_end.set()
        await settled(lambda: loop.pipeline.num_grading == 1)
        client.grows, client.may_end = 0, asyncio.Event()
        loop.pipeline._stale_groups.cancel(["p0"], 1)
        await settled(lambda: len(client.calls) == 2)
        await loop.samples.save()
        assert loop.ledger.saved_bytes == 0
    with SqliteLedger(tmp_path / LEDGER_FILE) as again:
        assert (again.received("p0"), again.saved_bytes) == (None, 0)


async def test_a_group_forgotten_while_samples_are_saved_is_not_saved_any_more(
    tmp_path: Path,
) -> None:
    client = GrowingClient()
    async with service(config(tmp_path), client) as loop:
        submit(loop, ["first", "second"])
        await loop.pipeline.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: received(loop) == 200)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(loop.samples.save())
            await settled(lambda: bool(loop.ledger.saved_bytes))
            before = loop.ledger.saved_bytes
            loop.samples.forget("p1")
        assert loop.ledger.saved_bytes == before


async def test_tokens_of_groups_that_still_unwind_are_not_saved_for_the_next_trainer(
    tmp_path: Path,
) -> None:
    client = GrowingClient(unwinds=asyncio.Event())
    async with service(config(tmp_path), client) as loop:
        submit(loop, ["first"])
        await loop.pipeline.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: received(loop) == 100)
        async with asyncio.TaskGroup() as tasks:
            taking_over = loop.pipeline.announce("another", 0, [replica("a")], None)
            tasks.create_task(taking_over)
            await settled(lambda: client.cancelled == ["p0"])
            client.grows = 0
            await loop.samples.save()
            assert client.unwinds is not None
            client.unwinds.set()
        assert loop.ledger.saved_bytes == 0
    with SqliteLedger(tmp_path / LEDGER_FILE) as again:
        assert again.received("p0") is None


async def test_samples_that_were_taken_up_are_not_written_once_more(tmp_path: Path) -> None:
    sizes: list[int | None] = []
    for _ in range(3):
        client = GrowingClient(grows=50 if not sizes else 0)
        async with service(config(tmp_path), client) as loop:
            if not sizes:
                submit(loop, ["first"])
            await loop.pipeline.announce("trainer", 0, [replica("a")], None)
            await settled(lambda: len(client.calls) == 1)  # noqa: B023
            if not sizes:
                await settled(lambda: received(loop) == 100)
            await loop.samples.save()
            sizes.append(loop.ledger.saved_bytes)
    assert sizes[0]
    assert sizes == sizes[:1] * 3


async def test_what_follows_samples_that_were_taken_up_is_written_behind_them(
    tmp_path: Path,
) -> None:
    for grows in (50, 7):
        client = GrowingClient(grows=grows)
        async with service(config(tmp_path), client) as loop:
            if grows == 50:
                submit(loop, ["first"])
            await loop.pipeline.announce("trainer", 0, [replica("a")], None)
            await settled(lambda: received(loop) == 2 * grows)  # noqa: B023
            await loop.samples.save()
    with SqliteLedger(tmp_path / LEDGER_FILE) as again:
        found = again.received("p0")
    assert found is not None
    sampled = [*range(50), *range(7)]
    assert [rollout.token_ids.tolist() for rollout in found.rollouts] == [sampled, sampled]


def parts_of(index: int, count: int, start: int = 0) -> SampleParts:
    part = SamplePart.of(rollout_of("", index, 0, 1, count), start)
    return SampleParts.of(b"way", PROMPT_TOKENS, (part,))


def test_parts_that_follow_nothing_cost_the_samples_of_their_prompt_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bodies = [
        ("p0", encode_parts(parts_of(0, 9, start=5))),
        ("p1", encode_parts(parts_of(0, 4))),
        ("p0", encode_parts(parts_of(0, 9))),
        ("p2", b"no parts"),
    ]
    assert list(decode_samples(bodies)) == ["p1"]
    assert [record.args[0] for record in caplog.records if record.args] == ["p0", "p2"]  # type: ignore[index]


def test_a_ledger_with_samples_that_do_not_fit_opens_and_forgets_them(tmp_path: Path) -> None:
    path, prompt = tmp_path / "ledger.sqlite", client_prompt()
    with SqliteLedger(path) as ledger:
        ledger.accept(prompt)
        ledger.save_samples(prompt.prompt_id, parts_of(0, 9, start=5))
    for _ in range(2):
        with SqliteLedger(path) as again:
            assert (again.received(prompt.prompt_id), again.saved_bytes) == (None, 0)
            assert again.prompt(prompt.prompt_id) is not None


def row(position: int) -> Prompt:
    reported = client_prompt(prompt_id=f"data-{position}")
    return replace(reported, sequence=position, origin=PromptOrigin.DATASET, position=position)


def test_samples_of_rows_that_are_not_drawn_again_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with SqliteLedger(path) as ledger:
        for position in range(4):
            ledger.accept(row(position))
            ledger.save_samples(f"data-{position}", parts_of(0, 4))
    with SqliteLedger(path) as ledger:
        size = ledger.saved_bytes
        ledger.forget_data()
        ledger.restart_data(DataProgress(1, (2,)))
        assert [i for i in range(4) if ledger.received(f"data-{i}") is not None] == [1, 3]
        assert ledger.saved_bytes == (size or 0) // 2


async def test_rows_that_are_drawn_again_keep_what_another_trainer_can_use_of_their_samples(
    tmp_path: Path,
) -> None:
    path = tmp_path / LEDGER_FILE
    with SqliteLedger(path) as ledger:
        ledger.accept(row(0))
        parts = [
            SamplePart.of(rollout_of("", i, version, 1, 4), 0) for i, version in ((0, 1), (1, 3))
        ]
        ledger.save_samples("data-0", SampleParts.of(b"way", PROMPT_TOKENS, parts))
    async with service(config(tmp_path), ScriptedClient()) as loop:
        before = loop.ledger.saved_bytes or 0
        await loop.pipeline.announce("another", 1, [], DataProgress(0))
        found = loop.ledger.received("data-0")
        assert found is not None
        assert [rollout.sample_index for rollout in found.rollouts] == [0]
        assert 0 < (loop.ledger.saved_bytes or 0) < before


async def test_samples_taken_up_beyond_the_budget_end_a_group_that_no_replica_has_begun() -> None:
    client, prompt, budget = ScriptedClient(), client_prompt(), GroupBudget()
    whole = tuple(rollout_of("Answer: 1", index, 0, 1, 6) for index in (0, 1))
    resumed = ReceivedSamples(request_digest(prompt, SAMPLING), PROMPT_TOKENS, whole)
    rules = StragglerRules(group_token_budget=10)
    queue = ReplicaQueue(1.0, lambda: None)
    dispatcher = GroupDispatcher(client, queue, max_attempts=1, rules=rules)
    groups = [
        await dispatcher.generate(
            GroupRequest(
                *(prompt, indexes, SAMPLING, Priority.TRAINING, 0),
                budget=budget,
                received=resumed,
            )
        )
        for indexes in ((0, 1), (2, 3))
    ]
    assert [[r.finish_reason.value for r in group.rollouts] for group in groups] == [
        ["stop", "stop"],
        ["aborted", "aborted"],
    ]
    assert all(group.prompt_token_ids is PROMPT_TOKENS for group in groups)
    assert client.calls == []
