"""Validation: a sample that fails is counted and left out, too many of them end it."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.reward.app import open_prompt_sets
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GroupRequest,
    Purpose,
)
from services.reward.grading.grader import Grader, SampleScorer
from services.reward.groups.validation import (
    FinishedValidation,
    ValidationOrder,
    Validator,
    check_failures,
)
from services.reward.records.group_log import SampleDumps
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import (
    DataError,
    DeadlineError,
    EngineError,
    PromptTooLongError,
    ValidationFailedError,
    leaves,
)
from sluice.types import Failed, FailureKind, Outcome, Rollout, SamplingParams, Scored
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_app import (
    InlineScorer,
    ScriptedClient,
    publish,
    replica,
    running_app,
    settled,
)
from tests.support.scripted_rollout import rollout_of
from tests.support.validation_rows import Rows

SAMPLES = 2
RIGHT = Scored(1.0, 1.0, {})


class BreakingPrompts:
    """Breaks the streams of chosen prompts, in words that name no replica."""

    def __init__(self, *prompt_ids: str) -> None:
        self.prompt_ids = prompt_ids

    async def __call__(self, _name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id in self.prompt_ids:
            raise EngineError("out of memory")


class World:
    """A validation of `num_prompts` on one replica."""

    def __init__(
        self,
        client: ScriptedClient,
        num_prompts: int,
        scorer: SampleScorer | None = None,
        dumps: SampleDumps | None = None,
    ) -> None:
        self.reported_tokens: list[int] = []
        self.dispatcher = GroupDispatcher(client, ReplicaQueue(1.0), max_attempts=1)
        self.validation = Validator(
            lambda: Rows(num_prompts),
            self.dispatcher,
            Grader(scorer or InlineScorer(), None),
            dumps or SampleDumps(None, None),
            lambda: 0,
            on_tokens=self.reported_tokens.append,
        )

    async def run(self, num_examples: int = 0, seconds: float = 60.0) -> FinishedValidation:
        await self.dispatcher.announce([replica("a")])
        sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=1)
        order = ValidationOrder(0, SAMPLES, sampling, num_examples)
        return await self.validation.run(order, seconds)


async def test_a_prompt_that_cannot_be_generated_is_counted_and_left_out_of_the_mean(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(ScriptedClient(before_sample=BreakingPrompts("validation-3")), 20)
    with caplog.at_level(logging.WARNING):
        metrics = (await world.run()).metrics
    assert metrics["val-aux/num_failed_samples"] == SAMPLES
    assert metrics["val-aux/num_prompts"] == 19
    assert metrics["val-core/math_dapo/acc/mean@2"] == 0.5
    assert any(
        all(word in line for word in ("validation-3", "replica a", "engine_error", "out of memory"))
        for line in caplog.messages
    )
    assert world.validation.num_pending_tokens == 0
    assert world.validation.num_graded_groups == 20


async def test_a_validation_with_a_row_that_no_scorer_can_grade_fails_and_names_it(
    tmp_path: Path,
) -> None:
    rows = prompt_rows(["answer=1"] * 19) + prompt_rows(["answer=1"], "my_quiz")
    data = {"val_files": str(write_prompts(tmp_path / "val.parquet", rows))}
    config, client = msgspec.convert({"data": data}, RunConfig), ScriptedClient()
    async with running_app(config, client, open_prompt_sets(config)) as app:
        await publish(app, client, 0)
        sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=1)
        with pytest.raises(ExceptionGroup) as caught:
            await app.validation.run(ValidationOrder(0, SAMPLES, sampling, 0), 60.0)
    (error,) = leaves(caught.value)
    assert isinstance(error, DataError)
    assert re.search(r"val\.parquet.* 19: data_source 'my_quiz': no built-in scorer", str(error))


async def hold_the_second_sample(_name: str, request: GroupRequest, index: int) -> None:
    if request.prompt.prompt_id == "validation-5" and index == 1:
        await asyncio.Event().wait()


@pytest.mark.parametrize("before_sample", [BreakingPrompts("validation-3"), hold_the_second_sample])
async def test_all_tokens_of_a_validation_are_reported_even_if_it_does_not_end(
    before_sample: Any,
) -> None:
    world = World(ScriptedClient(before_sample=before_sample), 20)
    with suppress(DeadlineError):
        await world.run(seconds=0.5)
    received = world.dispatcher.num_received
    assert sum(world.reported_tokens) == received[Purpose.VALIDATION] > 0
    assert received[Purpose.TRAINING] == 0
    assert world.validation.num_pending_tokens == 0


class ScorerOutOfOrder(InlineScorer):
    """No process can be had for the third group."""

    num_groups = 0

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored | Failed, ...]:
        self.num_groups += 1
        if self.num_groups == 3:
            return (Failed(FailureKind.SCORER_CRASH, "loading the scorer: too slow"),) * len(items)
        return await super().score(items)


async def test_a_group_for_which_no_scorer_can_be_had_does_not_end_the_evaluation() -> None:
    metrics = (await World(ScriptedClient(), 20, ScorerOutOfOrder()).run()).metrics
    assert metrics["val-aux/num_failed_samples"] == SAMPLES
    assert metrics["val-aux/num_prompts"] == 19


async def test_too_many_failures_end_the_validation_with_their_number_and_an_example() -> None:
    client = ScriptedClient(before_sample=BreakingPrompts(*(f"validation-{i}" for i in range(3))))
    with pytest.raises(ValidationFailedError) as failure:
        await World(client, 20).run()
    text = str(failure.value)
    assert (
        "validating version 0: 6 of 40 samples failed (6 engine_error), more than the 10%" in text
    )
    assert "out of memory" in text


@pytest.mark.parametrize(("num_failed", "fails"), [(0, False), (1, False), (2, True)])
def test_a_tenth_of_the_samples_may_fail(num_failed: int, fails: bool) -> None:
    outcomes: list[Outcome] = [RIGHT] * (10 - num_failed)
    outcomes += [Failed(FailureKind.UNSCORABLE, "no number")] * num_failed
    if not fails:
        check_failures(outcomes, "validating version 7")
        return
    with pytest.raises(ValidationFailedError, match=r"version 7: 2 of 10 .*\(2 unscorable\)"):
        check_failures(outcomes, "validating version 7")


async def test_metrics_are_computed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, served = threading.Event(), threading.Event()

    def held(_prompts: object) -> dict[str, list[float]]:
        begun.set()
        assert served.wait(60.0), "the event loop serves no one meanwhile"
        return {}

    monkeypatch.setattr("services.reward.groups.validation.prompt_values", held)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(World(ScriptedClient(), 2).run())
        await settled(begun.is_set)
        served.set()


class HeldPrompts:
    """Holds every sample of one prompt back until it is let go."""

    def __init__(self, prompt_id: str) -> None:
        self.prompt_id, self.gate = prompt_id, asyncio.Event()

    async def __call__(self, _name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id == self.prompt_id:
            await self.gate.wait()


async def test_a_running_validation_shows_how_far_it_is() -> None:
    held = HeldPrompts("validation-5")
    world = World(ScriptedClient(before_sample=held), 6)
    validation = world.validation
    assert (validation.num_prompts_done, validation.num_prompts) == (0, 0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(world.run())
        async with asyncio.timeout(60):
            while validation.num_prompts_done < 5:
                await asyncio.sleep(0)
        assert validation.num_prompts == 6
        held.gate.set()
    assert (validation.num_prompts_done, validation.num_prompts) == (0, 0)


async def test_tokens_are_let_go_as_soon_as_a_group_is_graded() -> None:
    def make(name: str, request: GroupRequest, index: int) -> Rollout:
        rollout = rollout_of("Answer: 1", index, 0, request.sampling.seed, 8)
        tokens.append(weakref.ref(rollout.token_ids))
        return rollout

    held = HeldPrompts("validation-19")
    tokens: list[weakref.ref[object]] = []
    world = World(ScriptedClient(before_sample=held, make=make), 20)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.run(num_examples=3))
        await settled(lambda: world.validation.num_graded_groups == 19)
        gc.collect()
        assert len(tokens) == 19 * SAMPLES
        assert [token for token in tokens if token() is not None] == []
        held.gate.set()
    result = running.result()
    assert result.num_generated_tokens == 20 * SAMPLES * 8
    assert len(result.examples) == 3


@pytest.mark.parametrize("last", [0, 7, 23, 59])
async def test_the_examples_are_of_the_same_prompts_of_the_whole_set_in_any_order_of_grades(
    last: int,
) -> None:
    held = HeldPrompts(f"validation-{last}")
    world = World(ScriptedClient(before_sample=held), 60)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.run(num_examples=6))
        await settled(lambda: world.validation.num_graded_groups == 59)
        held.gate.set()
    shown = [example.prompt for example in running.result().examples]
    undisturbed = await World(ScriptedClient(), 60).run(6)
    assert shown == [example.prompt for example in undisturbed.examples]
    places = [int(prompt.rpartition("=")[2]) for prompt in shown]
    assert min(places) < 30 < max(places)


async def test_a_second_validation_starts_after_the_first_has_ended() -> None:
    held = HeldPrompts("validation-2")
    client = ScriptedClient(before_sample=held)
    world = World(client, 3)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(world.run()) for _ in range(2)]
        await settled(lambda: world.validation.num_graded_groups == 2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(client.calls) == 3
        held.gate.set()
    assert len(client.calls) == 6
    assert [task.result().metrics["val-aux/num_prompts"] for task in running] == [3.0, 3.0]


async def test_a_validation_waits_for_another_no_longer_than_its_deadline() -> None:
    held = HeldPrompts("validation-0")
    world = World(ScriptedClient(before_sample=held), 1)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.run())
        await settled(lambda: len(world.validation._open) == 1)
        with pytest.raises(DeadlineError, match="after another validation"):
            await world.run(seconds=0.05)
        held.gate.set()
    assert running.result().metrics["val-aux/num_prompts"] == 1.0


async def test_a_validation_that_is_cancelled_ends_its_streams() -> None:
    never = asyncio.Event()

    async def hang(_name: str, _request: GroupRequest, _index: int) -> None:
        await never.wait()

    client = ScriptedClient(before_sample=hang)
    world = World(client, 3)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.run())
        await settled(lambda: len(client.calls) == 3)
        running.cancel()
    assert len(client.cancelled) == 3
    assert world.validation.num_pending_tokens == 0


async def test_a_prompt_that_is_too_long_is_no_part_of_the_validation_set() -> None:
    client = ScriptedClient()

    async def refuse(_name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id in ("validation-0", "validation-1"):
            raise PromptTooLongError.of(9, 4)

    client.before_sample = refuse
    result = await World(client, num_prompts=3).run()
    assert result.metrics["val-aux/num_prompts"] == 1
    assert result.metrics["val-aux/num_failed_samples"] == 0


async def test_every_graded_response_is_written_where_asked(tmp_path: Path) -> None:
    world = World(ScriptedClient(), 3, dumps=SampleDumps(None, tmp_path))
    await world.run()
    rows = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * SAMPLES
    assert {"input", "output", "gts", "score", "step", "acc", "pred", "uid"} <= rows[0].keys()


async def test_a_folder_that_cannot_be_written_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    world = World(ScriptedClient(), 2, dumps=SampleDumps(None, blocked))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await world.run()).metrics
    assert caplog.text.count("samples are not written") == 1
