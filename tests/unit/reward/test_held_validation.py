"""A validation beside training: replicas held at its version serve it, the others train on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import GroupRequest, Purpose
from services.reward.grading.grader import Grader
from services.reward.groups.validation import ValidationOrder, Validator
from services.reward.records.group_log import SampleDumps
from sluice.algorithm.routing import AnnouncedReplica, ReplicaUse
from sluice.errors import NotReadyError, ValidationFailedError
from sluice.types import RolloutGroup, SamplingParams
from tests.support.reward_app import InlineScorer, ScriptedClient, replica, settled
from tests.unit.reward.test_group_dispatcher import request
from tests.unit.reward.test_validation import SAMPLES, Rows

VERSION = 3
SAMPLING = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=1)


def held(name: str, slots: int = 4) -> AnnouncedReplica:
    return replica(name, VERSION, slots=slots, use=ReplicaUse.VALIDATION)


def leaving(name: str, slots: int = 4) -> AnnouncedReplica:
    return replica(name, VERSION, slots=slots, use=ReplicaUse.TRAINING)


def newer(name: str, slots: int = 4) -> AnnouncedReplica:
    return replica(name, VERSION + 1, slots=slots)


class World:
    """A dispatcher over scripted replicas, whose samples wait until `opened` has their replica."""

    def __init__(self) -> None:
        self.opened: set[str] = set()
        self.client = ScriptedClient(before_sample=self._wait)
        self.queue = ReplicaQueue(1.0)
        self.dispatcher = GroupDispatcher(self.client, self.queue, max_attempts=3)
        self._changed = asyncio.Condition()

    async def _wait(self, name: str, _request: GroupRequest, _index: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: name in self.opened)

    async def open(self, *names: str) -> None:
        async with self._changed:
            self.opened.update(names)
            self._changed.notify_all()

    async def announce(self, *replicas: AnnouncedReplica) -> None:
        for one in replicas:
            self.client.versions[one.info.name] = one.policy_version
        await self.dispatcher.announce(replicas)

    def start(self, tasks: asyncio.TaskGroup, wanted: GroupRequest) -> asyncio.Task[RolloutGroup]:
        return tasks.create_task(self.dispatcher.generate(wanted))

    def replicas_of(self, prompt_id: str) -> list[str]:
        return [name for name, prompt, _ in self.client.calls if prompt == prompt_id]

    async def called(self, count: int) -> None:
        await settled(lambda: len(self.client.calls) == count)


@pytest.fixture
def world() -> World:
    return World()


def of_validation(sequence: int, n: int = 4) -> GroupRequest:
    return request(
        sequence,
        n=n,
        purpose=Purpose.VALIDATION,
        lowest_version=VERSION,
        highest_version=VERSION,
    )


def versions(group: RolloutGroup) -> set[int]:
    return {span.version for rollout in group.rollouts for span in rollout.version_spans}


async def test_validation_goes_to_held_replicas_and_training_to_the_others(world: World) -> None:
    await world.open("a", "b")
    await world.announce(held("a"), newer("b", slots=4))
    for sequence in range(3):
        assert versions(await world.dispatcher.generate(of_validation(sequence))) == {VERSION}
        await world.dispatcher.generate(request(10 + sequence, lowest_version=VERSION - 1))
        assert world.replicas_of(f"p{sequence}") == ["a"]
        assert world.replicas_of(f"p{10 + sequence}") == ["b"]


async def test_no_capacity_of_held_replicas_is_offered_to_training(world: World) -> None:
    await world.announce(held("a", slots=100), newer("b", slots=4))
    assert world.queue.num_free_sequences(0) == 4


async def test_a_backlog_of_validation_on_held_replicas_takes_no_places_from_training(
    world: World,
) -> None:
    await world.announce(held("a", slots=4), newer("b", slots=4))
    async with asyncio.TaskGroup() as tasks:
        for sequence in range(8):
            world.start(tasks, of_validation(sequence))
        await settled(lambda: world.queue.num_waiting >= 4)
        assert world.queue.num_free_sequences(0) == 4
        await world.open("a")


async def test_training_does_not_wait_behind_a_validation_that_waits_for_held_replicas(
    world: World,
) -> None:
    await world.open("b")
    await world.announce(held("a"), newer("b"))
    async with asyncio.TaskGroup() as tasks:
        for sequence in range(3):
            world.start(tasks, of_validation(sequence))
        await settled(lambda: world.queue.num_waiting == 2)
        await world.dispatcher.generate(request(9))
        assert world.replicas_of("p9") == ["b"]
        await world.open("a")


async def test_samples_of_a_validation_move_to_a_held_replica_before_the_others_swap(
    world: World,
) -> None:
    await world.announce(replica("b", VERSION, slots=8), replica("a", VERSION, slots=4))
    async with asyncio.TaskGroup() as tasks:
        validating = world.start(tasks, of_validation(0, n=8))
        training = world.start(tasks, request(9))
        await world.called(2)
        assert (world.replicas_of("p0"), world.replicas_of("p9")) == (["b"], ["a"])
        await world.announce(held("a", slots=12), leaving("b", slots=8))
        await settled(lambda: world.replicas_of("p0") == ["b", "a"])
        await world.announce(held("a", slots=12), newer("b", slots=8))
        await world.open("a", "b")
    assert versions(validating.result()) == {VERSION}
    # A group in training stays where it is.
    assert (training.result().rollouts[0].version_spans[0].version, world.client.cancelled) == (
        VERSION,
        ["p0"],
    )


async def test_prompts_of_a_held_replica_that_is_lost_go_to_another_held_one(world: World) -> None:
    await world.announce(held("a"), held("b"), newer("c"))
    async with asyncio.TaskGroup() as tasks:
        groups = [world.start(tasks, of_validation(sequence)) for sequence in range(2)]
        await world.called(2)
        await world.announce(held("b"), newer("c"))
        await world.open("b", "c")
    assert world.replicas_of("p0") == ["a", "b"]
    assert [versions(group.result()) for group in groups] == [{VERSION}, {VERSION}]


@pytest.mark.parametrize("other", [newer, leaving])
async def test_a_validation_without_a_held_replica_fails_and_names_its_version(
    world: World, other: Callable[[str], AnnouncedReplica]
) -> None:
    await world.open("b")
    await world.announce(held("a"), other("b"))

    async def lose_the_held_replica() -> None:
        async with asyncio.TaskGroup() as tasks:
            world.start(tasks, of_validation(0))
            await world.called(1)
            await world.announce(other("b"))

    with pytest.raises(ExceptionGroup) as caught:
        await lose_the_held_replica()
    assert caught.group_contains(
        ValidationFailedError, match="version 3: no replica that serves it is left"
    )
    assert world.replicas_of("p0") == ["a"]
    await world.dispatcher.generate(request(1))  # it blocks no one


def _validator(world: World, announced: int) -> Validator:
    return Validator(
        lambda: Rows(6),
        world.dispatcher,
        Grader(InlineScorer(), None),
        SampleDumps(None, None),
        lambda: announced,
    )


async def test_a_held_version_is_validated_although_a_newer_one_is_announced(world: World) -> None:
    await world.open("a", "b")
    await world.announce(held("a"), newer("b"))
    order = ValidationOrder(VERSION, SAMPLES, SAMPLING, 0)
    metrics = (await _validator(world, VERSION + 1).run(order, 60.0)).metrics
    assert metrics["val-aux/num_prompts"] == 6
    assert {name for name, _, _ in world.client.calls} == {"a"}


async def test_a_version_that_no_replica_is_held_at_is_refused(world: World) -> None:
    await world.announce(newer("a"), newer("b"))
    order = ValidationOrder(VERSION, SAMPLES, SAMPLING, 0)
    with pytest.raises(NotReadyError, match="version 3 is to be validated, but 4 is announced"):
        await _validator(world, VERSION + 1).run(order, 60.0)
