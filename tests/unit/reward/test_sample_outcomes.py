"""Samples without a score in the loop: tried again, left out, or the end of their group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.app import PromptSets, RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.group_table import EventKind, GroupEvent, PromptOutcome
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import EngineError
from sluice.types import Failed, FailureKind, Outcome, PromptEnd, Rollout, Scored
from tests.support.reward_app import InlineScorer, ScriptedClient, publish, replica, submit
from tests.support.scripted_rollout import rollout_of

pytestmark = pytest.mark.usefixtures("waits_take_no_time")
SAMPLES = 4
CRASH, TIMEOUT = FailureKind.SCORER_CRASH, FailureKind.SCORER_TIMEOUT
UNSCORABLE, ENGINE = FailureKind.UNSCORABLE, FailureKind.ENGINE_ERROR


def config(outcomes: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": SAMPLES}},
        "algorithm": {"filter_groups": {"enable": True, "min_yield": 0}},
        "sluice": {
            "asynchrony": {"max_staleness": 0},
            "reward": {"max_attempts": 2, "outcomes": outcomes or {}},
            **sections,
        },
    }
    return msgspec.convert(tree, RunConfig)


class Scorer(InlineScorer):
    """Fails as `fails` says of a sample's text and of how often it was asked about that text."""

    def __init__(self, fails: Callable[[str, int], FailureKind | None]) -> None:
        self._fails = fails
        self.asked: Counter[str] = Counter()

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored | Failed, ...]:
        return tuple(self._judged(item) for item in items)

    def _judged(self, item: ScorerInput) -> Scored | Failed:
        self.asked[item.response] += 1
        kind = self._fails(item.response, self.asked[item.response])
        return self._score(item) if kind is None else Failed(kind, "as the test says")


class Texts(ScriptedClient):
    """Responses that name their sample and, by their seeds, how often it was generated."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(make=self._named, **fields)
        self.seeds: dict[str, list[int]] = {}

    def _named(self, _name: str, request: GroupRequest, index: int) -> Rollout:
        seeds = self.seeds.setdefault(request.prompt.prompt_id, [])
        if request.sampling.seed not in seeds:
            seeds.append(request.sampling.seed)
        draw, answer = seeds.index(request.sampling.seed) + 1, 1 if index % 2 else 2
        text = f"{request.prompt.prompt_id} sample {index} draw {draw}\nAnswer: {answer}"
        return rollout_of(text, index, self.versions.get("a", 0), request.sampling.seed, 3)


@asynccontextmanager
async def running(
    rules: RunConfig, client: ScriptedClient, scorer: InlineScorer
) -> AsyncIterator[RewardApp]:
    app = RewardApp(rules, PromptSets(), scorer, client)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(app.loop.run())
        await app.loop.announce("trainer", 0, [replica("a")], None)
        yield app
        task.cancel()


async def first_group(
    rules: RunConfig,
    fails: Callable[[str, int], FailureKind | None],
    client: ScriptedClient | None = None,
) -> tuple[list[str], dict[str, float], Counter[str]]:
    """The texts of the first trained group, the statistics, and what the scorer was asked."""
    scorer = Scorer(fails)
    async with running(rules, client or Texts(), scorer) as app:
        submit(app, ["first", "second"])
        batch = await app.loop.batches.take(1, 0, 60)
        statistics = app.statistics()
    (group,) = batch.groups
    return [rollout.text for rollout in group.rollouts], statistics, scorer.asked


def of_sample(
    index: int, kind: FailureKind, times: int
) -> Callable[[str, int], FailureKind | None]:
    """The first `times` looks at sample `index` of p0 fail, whichever draw it is of."""
    seen = Counter[str]()

    def fails(text: str, _: int) -> FailureKind | None:
        if not text.startswith(f"p0 sample {index} "):
            return None
        seen["p0"] += 1
        return kind if seen["p0"] <= times else None

    return fails


@pytest.mark.parametrize("kind", [CRASH, TIMEOUT])
async def test_a_sample_that_cost_a_scorer_is_scored_once_more(kind: FailureKind) -> None:
    texts, statistics, asked = await first_group(config(), of_sample(2, kind, 1))
    assert len(texts) == SAMPLES
    assert max(asked.values()) == 2
    assert statistics["reward/samples_scored_again"] == 1
    assert statistics["reward/outcomes/scored"] >= SAMPLES
    assert statistics[f"reward/outcomes/{kind}"] == 0


async def test_a_sample_is_not_scored_more_often_than_its_rule_says() -> None:
    rules = config({"scorer_crash": {"action": "score_again", "max_attempts": 3}})
    texts, statistics, asked = await first_group(rules, of_sample(2, CRASH, 99))
    assert [text.split("\n")[0] for text in texts] == [f"p0 sample {i} draw 1" for i in (0, 1, 3)]
    assert max(asked.values()) == 3
    assert statistics["reward/outcomes/scorer_crash"] == 1


async def test_a_sample_generated_again_comes_from_another_seed_and_takes_its_place() -> None:
    rules = config({"unscorable": {"action": "generate_again", "max_attempts": 3}})
    texts, statistics, _ = await first_group(rules, of_sample(1, UNSCORABLE, 2))
    draws = [text.split("\n")[0] for text in texts]
    assert draws == [f"p0 sample {i} draw {3 if i == 1 else 1}" for i in range(SAMPLES)]
    assert statistics["reward/samples_generated_again"] == 2
    assert statistics["reward/outcomes/unscorable"] == 2
    tokens = {n: c for n, c in statistics.items() if n.startswith("reward/tokens/")}
    received = tokens.pop("reward/tokens/received")
    assert sum(tokens.values()) == received


async def test_a_probe_is_not_generated_more_often_than_its_rule_says() -> None:
    rules = config(
        {"unscorable": {"action": "generate_again", "max_attempts": 2}},
        sampling={"strategy": "staged", "probe_samples": 2, "coverage_guard": False},
    )
    texts, _, asked = await first_group(rules, of_sample(0, UNSCORABLE, 99))
    assert [text.split("\n")[0] for text in texts] == [f"p0 sample {i} draw 1" for i in (1, 2, 3)]
    assert sum(count for text, count in asked.items() if text.startswith("p0 sample 0 ")) == 2


async def test_a_group_is_dropped_for_a_failure_that_costs_it() -> None:
    rules = config({"unscorable": {"action": "drop_group"}})
    texts, statistics, _ = await first_group(rules, of_sample(3, UNSCORABLE, 1))
    assert all(text.startswith("p1 ") for text in texts)
    assert statistics["reward/outcomes/unscorable"] == 1


@pytest.mark.parametrize(("min_share", "trained"), [(0.5, "p0"), (0.75, "p0"), (0.8, "p1")])
async def test_a_group_is_trained_while_enough_of_it_is_left(
    min_share: float, trained: str
) -> None:
    texts, _, _ = await first_group(config({"min_share": min_share}), of_sample(0, UNSCORABLE, 1))
    assert all(text.startswith(trained) for text in texts)


def breaks(indexes: Sequence[int]) -> Callable[[str, GroupRequest, int], Any]:
    """These samples of p0 break the stream that asks for them."""

    async def before_sample(_name: str, request: GroupRequest, index: int) -> None:
        if request.prompt.prompt_id == "p0" and index in indexes:
            raise EngineError("out of memory")

    return before_sample


@pytest.mark.parametrize(
    ("broken", "then", "trained"),
    [((3,), "leave_out", "p0"), ((3,), "drop_group", "p1"), ((1, 2, 3), "leave_out", "p1")],
)
async def test_a_group_goes_without_samples_that_no_replica_can_generate(
    broken: tuple[int, ...], then: str, trained: str
) -> None:
    client = Texts(before_sample=breaks(broken))
    rules = config({"engine_error": {"then": then}})
    texts, statistics, _ = await first_group(rules, lambda _text, _times: None, client)
    assert all(text.startswith(trained) for text in texts)
    assert statistics["reward/outcomes/engine_error"] == len(broken)
    assert statistics["reward/outcomes/aborted"] == 0


async def test_a_client_learns_how_the_samples_of_its_prompt_ended() -> None:
    rules, scorer = config(), Scorer(of_sample(0, UNSCORABLE, 1))
    async with running(rules, Texts(), scorer) as app:
        session = submit(app, ["first"])
        batch = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(batch.batch_id, 1)
        session.close_input()
        events = [event async for event in _events(session)]
    outcome = next(event for event in events if isinstance(event, PromptOutcome))
    assert outcome.end is PromptEnd.TRAINED
    assert outcome.samples == {"scored": 3, "unscorable": 1}
    assert len(outcome.rewards) == 3


async def _events(session: Any) -> AsyncIterator[Any]:
    while (event := await session.next_event()) is not None:
        yield event


outcomes_of: st.SearchStrategy[FailureKind | None] = st.sampled_from(
    [None, None, None, UNSCORABLE, TIMEOUT, CRASH]
)
actions = st.sampled_from(["score_again", "generate_again", "leave_out", "drop_group"])
thens = st.sampled_from(["leave_out", "drop_group"])
scoring = st.fixed_dictionaries(
    {"action": actions, "max_attempts": st.integers(1, 3), "then": thens}
)


@settings(max_examples=8, deadline=None)
@given(
    rules=st.fixed_dictionaries(
        {
            "unscorable": scoring,
            "scorer_timeout": scoring,
            "scorer_crash": scoring,
            "engine_error": st.fixed_dictionaries({"then": thens}),
            "max_strikes": st.sampled_from([None, 1, 2]),
        }
    ),
    fates=st.lists(outcomes_of, min_size=7, max_size=40),
    breaking=st.integers(2, 9),
    strategy=st.sampled_from(["stream", "staged"]),
)
def test_whatever_becomes_of_samples_every_prompt_ends_once_and_no_failure_is_a_reward(
    rules: dict[str, Any], fates: list[FailureKind | None], breaking: int, strategy: str
) -> None:
    settled = asyncio.run(_ends_of(rules, fates, breaking, strategy))
    assert Counter(outcome.prompt_id for outcome in settled) == Counter(
        {f"p{number}": 1 for number in range(12)}
    )
    for outcome in settled:
        assert len(outcome.rewards) == outcome.samples.get("scored", 0)
        assert set(outcome.rewards) <= {1.0, -1.0}


async def _ends_of(
    rules: dict[str, Any], fates: list[FailureKind | None], breaking: int, strategy: str
) -> list[PromptOutcome]:
    turns = Counter[str]()

    def next_outcome(_text: str, _times: int) -> FailureKind | None:
        turns["scored"] += 1
        return fates[turns["scored"] % len(fates)]

    async def break_some(_name: str, _request: GroupRequest, _index: int) -> None:
        turns["sampled"] += 1
        if turns["sampled"] % (breaking * 6) == 0:
            raise EngineError("out of memory")

    sampling = {"strategy": strategy, "probe_samples": 2}
    ended: list[PromptOutcome] = []
    scorer = Scorer(next_outcome)
    client = Texts(before_sample=break_some)
    async with running(config(rules, sampling=sampling), client, scorer) as app:

        def note(event: GroupEvent) -> None:
            if event.kind is EventKind.ENDED:
                ended.append(event.group.outcome)

        app.groups.observe(note)
        submit(app, [f"prompt {number}" for number in range(12)])
        async with asyncio.timeout(60):
            while len(ended) < 12:
                await _train_what_is_kept(app, client)
        accounts = app.ledger
        statistics = app.statistics()
    assert (accounts.num_submitted, accounts.num_pending) == (12, 0)
    assert statistics["reward/prompts_lost"] == 0
    assert statistics["reward/tokens/pending"] == 0
    return ended


async def _train_what_is_kept(app: RewardApp, client: ScriptedClient) -> None:
    if app.groups.num_kept:
        version = app.groups.policy_version or 0
        batch = await app.loop.batches.take(version + 1, version, 60)
        check_scored(batch.groups)
        app.loop.batches.acknowledge(batch.batch_id, version + 1)
        await publish(app, client, version + 1)
    await asyncio.sleep(0.001)


def check_scored(groups: Sequence[Any]) -> None:
    """What is trained has scores, as many as samples."""
    for group in groups:
        outcomes: tuple[Outcome, ...] = group.scores
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        assert len(group.rollouts) == len(outcomes) >= 2
