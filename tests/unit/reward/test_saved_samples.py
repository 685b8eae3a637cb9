"""What groups have received is saved, and a service that starts anew goes on from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.generation.queue import Priority
from services.reward.generation.request import (
    GenerateEvent,
    GroupRequest,
    ReceivedSamples,
    first_samples,
    request_digest,
)
from services.reward.generation.stream import CollectedGroup
from services.reward.ledger.content import SampleParts, decode_samples, encode_parts
from services.reward.ledger.sqlite import SqliteLedger
from services.reward.records.saved_samples import SampleSaver
from services.reward.records.tokens import GenerationTrace, TokenUse, uses_of_group
from sluice.algorithm.growing_sample import NewTokens
from sluice.types import (
    FinishReason,
    GradedGroup,
    Prompt,
    PromptEnd,
    Rollout,
    SamplingParams,
    Scored,
)
from tests.support.client_prompt import client_prompt
from tests.support.reward_loop import ScriptedClient
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

SAMPLING = SamplingParams(1.0, 1.0, -1, 64, 7)


def request(
    prompt: Prompt, *, lowest: int = 0, received: ReceivedSamples | None = None
) -> GroupRequest:
    return GroupRequest(
        prompt,
        first_samples(3),
        SAMPLING,
        Priority.TRAINING,
        lowest,
        received=received,
        is_saved=True,
    )


def news(index: int, count: int, version: int, first: int = 0) -> NewTokens:
    tokens = np.arange(first, first + count, dtype=np.uint32)
    return NewTokens(index, tokens, -tokens.astype(np.float32), version)


def grow(group: CollectedGroup, *deltas: NewTokens) -> None:
    if group.prompt_token_ids is None:
        group.started(PROMPT_TOKENS, 0.0)
    group.take(GenerateEvent(None, (), deltas), "replica")


def end(group: CollectedGroup, index: int, *, extra: int) -> None:
    """A sample comes whole, `extra` tokens longer than what is known of it."""
    known = group.growing[index].rollout(index)
    more = news(index, extra, known.version_spans[-1].version, first=known.num_tokens)
    tokens = np.concatenate([known.token_ids, more.token_ids])
    logprobs = np.concatenate([known.behavior_logprobs, more.behavior_logprobs])
    *before, last = known.version_spans
    spans = (*before, replace(last, end=tokens.size))
    whole = Rollout(index, tokens, logprobs, spans, FinishReason.STOP, "the end")
    group.take(GenerateEvent(None, (whole,)), "replica")


def same(one: Rollout, other: Rollout) -> bool:
    return (
        np.array_equal(one.token_ids, other.token_ids)
        and np.array_equal(one.behavior_logprobs, other.behavior_logprobs)
        and (one.version_spans, one.finish_reason, one.text, one.sample_index)
        == (other.version_spans, other.finish_reason, other.text, other.sample_index)
    )


def now(group: CollectedGroup) -> list[Rollout]:
    growing = [s.rollout(index) for index, s in group.growing.items() if s.num_tokens]
    return sorted((*group.finished.values(), *growing), key=lambda r: r.sample_index)


@dataclass
class Shelf:
    """A ledger with one pending prompt, and a keeper of its group."""

    path: Path
    ledger: SqliteLedger
    prompt: Prompt
    max_bytes: int = 1 << 20
    open: list[CollectedGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.ledger.prompt(self.prompt.prompt_id) is None:
            self.ledger.accept(self.prompt)
        self.prompt = next(iter(self.ledger.pending()))
        self.saver = SampleSaver(
            self.ledger, lambda: tuple(self.open), interval_s=1.0, max_bytes=self.max_bytes
        )

    async def saved(self) -> ReceivedSamples | None:
        """What another service would find now."""
        await self.saver.save()
        self.ledger.close()
        self.ledger = SqliteLedger(self.path)
        prompt = next(iter(self.ledger.pending()), self.prompt)
        self.__post_init__()
        return self.saver.received(prompt, SAMPLING)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    path = tmp_path / "ledger.sqlite"
    return Shelf(path, SqliteLedger(path), client_prompt())


steps = st.lists(
    st.tuples(
        st.sampled_from(["grow", "end", "abort", "forget", "save"]),
        st.integers(0, 2),
        st.integers(1, 5),
        st.integers(0, 3),
    ),
    max_size=25,
)


class Noted:
    """A ledger that keeps parts as a file would."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.bodies: list[tuple[str, bytes]] = []

    @property
    def saved_bytes(self) -> int:
        return sum(len(body) for _, body in self.bodies)

    def prompt(self, _prompt_id: str) -> Prompt:
        return self._prompt

    def save_samples(self, prompt_id: str, parts: SampleParts) -> None:
        self.bodies.append((prompt_id, encode_parts(parts)))


@given(steps=steps)
async def test_the_parts_that_were_saved_are_the_samples_however_they_came(
    steps: list[tuple[str, int, int, int]],
) -> None:
    prompt = client_prompt()
    noted, group = Noted(prompt), CollectedGroup(request(prompt))
    saver = SampleSaver(noted, lambda: (group,), interval_s=1.0, max_bytes=1 << 20)  # type: ignore[arg-type]
    version = 0
    for what, index, count, step in steps:
        version += step
        is_open = index not in group.finished
        known = group.growing[index].num_tokens if index in group.growing else 0
        if what == "grow" and is_open:
            grow(group, news(index, count, version, first=known + step))
        elif what == "end" and known:
            end(group, index, extra=count)
        elif what == "abort" and known:
            broken = group.growing[index].rollout(index)
            group.take(GenerateEvent(None, (broken,)), "replica")
        elif what == "forget" and known:
            del group._growing[index]
        elif what == "save":
            await saver.save()
    await saver.save()
    found = decode_samples(noted.bodies).get(prompt.prompt_id)
    held = {rollout.sample_index: rollout for rollout in now(group)}
    saved = {rollout.sample_index: rollout for rollout in found.rollouts} if found else {}
    assert held.keys() <= saved.keys()
    assert all(same(held[index], saved[index]) for index in held)


async def test_a_service_that_starts_anew_goes_on_from_what_was_saved(shelf: Shelf) -> None:
    group = CollectedGroup(request(shelf.prompt))
    shelf.open.append(group)
    grow(group, news(0, 5, 1), news(1, 4, 1))
    await shelf.saver.save()
    grow(group, news(0, 3, 2, first=5))
    end(group, 1, extra=2)
    found = await shelf.saved()
    assert found is not None
    again = CollectedGroup(request(shelf.prompt, received=found))
    assert len(again.resume_saved()) == 2
    assert all(same(one, other) for one, other in zip(now(group), now(again), strict=True))
    assert again.missing == (0, 2)
    assert [partial.num_tokens for partial in again.partials()] == [8]


async def test_samples_of_versions_that_are_too_old_are_not_taken_up(shelf: Shelf) -> None:
    group = CollectedGroup(request(shelf.prompt))
    shelf.open.append(group)
    grow(group, news(0, 5, 1), news(1, 4, 3))
    found = await shelf.saved()
    again = CollectedGroup(request(shelf.prompt, lowest=2, received=found))
    assert [rollout.sample_index for rollout in again.resume_saved()] == [1]
    assert again.num_tokens == 4


@pytest.mark.parametrize(("version", "left"), [(None, []), (0, []), (1, [0]), (3, [0, 1])])
async def test_another_trainer_goes_on_from_tokens_of_its_own_way_alone(
    shelf: Shelf, version: int | None, left: list[int]
) -> None:
    group = CollectedGroup(request(shelf.prompt))
    shelf.open.append(group)
    grow(group, news(0, 5, 1), news(1, 4, 3))
    await shelf.saved()
    shelf.open.clear()
    shelf.saver.change_trainer(version)
    for _ in range(2):  # at once, and after another start
        found = shelf.saver.received(shelf.prompt, SAMPLING)
        assert ([r.sample_index for r in found.rollouts] if found else []) == left
        found = await shelf.saved()
        assert ([r.sample_index for r in found.rollouts] if found else []) == left


async def test_samples_drawn_in_another_way_are_forgotten(shelf: Shelf) -> None:
    group = CollectedGroup(request(shelf.prompt))
    shelf.open.append(group)
    grow(group, news(0, 5, 1))
    assert await shelf.saved() is not None
    assert shelf.saver.received(shelf.prompt, replace(SAMPLING, max_tokens=9)) is None
    assert shelf.ledger.saved_bytes == 0


async def test_nothing_is_left_of_a_prompt_that_ended(shelf: Shelf) -> None:
    group = CollectedGroup(request(shelf.prompt))
    grow(group, news(0, 5, 1))
    shelf.saver.request_ended(group)
    await shelf.saver.save()
    assert shelf.ledger.saved_bytes
    shelf.ledger.end(shelf.prompt.prompt_id, PromptEnd.TRAINED, step=1)
    shelf.saver.request_ended(group)
    await shelf.saver.save()
    assert shelf.ledger.saved_bytes == 0
    shelf.ledger.close()
    with SqliteLedger(shelf.path) as again:
        assert (again.saved_bytes, again.received(shelf.prompt.prompt_id)) == (0, None)


async def test_a_sample_that_started_again_is_told_from_its_first_token(shelf: Shelf) -> None:
    group = CollectedGroup(request(shelf.prompt))
    shelf.open.append(group)
    grow(group, news(0, 5, 1))
    await shelf.saver.save()
    del group._growing[0]
    grow(group, news(0, 9, 2, first=50))
    found = await shelf.saved()
    assert found is not None
    assert all(same(one, other) for one, other in zip(now(group), found.rollouts, strict=True))


async def test_groups_beyond_the_bound_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    shelf = Shelf(path, SqliteLedger(path), client_prompt(), max_bytes=300)
    group = CollectedGroup(request(shelf.prompt))
    shelf.open.append(group)
    grow(group, news(0, 10, 1))
    await shelf.saver.save()
    grow(group, news(1, 1000, 1))
    found = await shelf.saved()
    assert found is not None
    assert [rollout.num_tokens for rollout in found.rollouts] == [10]


def test_the_digest_tells_prompts_and_ways_of_drawing_apart() -> None:
    one = request_digest(client_prompt("a"), SAMPLING)
    assert one == request_digest(client_prompt("a", prompt_id="p9"), replace(SAMPLING))
    assert one != request_digest(client_prompt("b"), SAMPLING)
    assert one != request_digest(client_prompt("a"), replace(SAMPLING, seed=8))
    assert one != request_digest(client_prompt("a"), replace(SAMPLING, stop=("END",)))


def test_tokens_of_an_earlier_service_are_trained_and_taken_off_the_aborted_ones() -> None:
    prompt, trace = client_prompt(), GenerationTrace(ScriptedClient())
    partial = rollout_of("", 0, 0, 1, 5)
    asked = request(prompt)
    trace.resumed(asked, (partial,))
    taken = trace.of(prompt.prompt_id)
    taken.asked(asked.sampling, (0,), (partial,))
    whole = rollout_of("", 0, 0, 1, 9)
    taken.arrived(asked.sampling, GenerateEvent(None, (whole,)))
    assert (taken.num_tokens, taken.num_reused_tokens, trace.num_reused_tokens) == (4, 5, 5)
    group = CollectedGroup(replace(asked, sample_indexes=(0,)))
    group.started(PROMPT_TOKENS, 0.0)
    group.take(GenerateEvent(None, (whole,)), "a")
    graded = GradedGroup(group.group(), (Scored(1.0, 1.0, {}),))
    uses = uses_of_group(TokenUse.TRAINED, taken, graded)
    assert (uses[TokenUse.TRAINED], uses[TokenUse.ABORTED]) == (9, -5)
    assert uses.total() == taken.num_tokens
    assert uses_of_group(TokenUse.STALE, taken, None).total() == taken.num_tokens
