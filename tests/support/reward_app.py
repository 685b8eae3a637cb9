"""The reward loop in this process: the real loop, scripted replicas and scorers, no sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from services.reward.app import PromptSets, RewardApp, RunFiles
from services.reward.episodes.drivers import EpisodeDrivers
from services.reward.generation.request import GenerateEvent, GroupRequest
from services.reward.prompts.submissions import SubmissionSession
from sluice.algorithm.routing import AnnouncedReplica, ReplicaUse
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.types import Failed, ReplicaInfo, Rollout, Scored, TokenIds, TrainBatch
from tests.support.client_prompt import client_prompt
from tests.support.scripted_rollout import PROMPT_TOKENS, answer_text, rollout_of


def replica(
    name: str, version: int = 0, *, slots: int = 64, use: ReplicaUse = ReplicaUse.ANY
) -> AnnouncedReplica:
    """An announced replica."""
    return AnnouncedReplica(ReplicaInfo(name, f"{name}-1", f"{name}:1", slots), version, use)


@dataclass
class ScriptedClient:
    """Replicas that answer as the prompts say, with the version in `versions` (default 0).

    `before_sample(replica name, request, sample index)` is awaited before each sample.
    """

    before_sample: Callable[[str, GroupRequest, int], Awaitable[None]] | None = None
    versions: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    make: Callable[[str, GroupRequest, int], Rollout] | None = None

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout] = (),
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream scripted samples."""
        self.calls.append((replica.name, request.prompt.prompt_id, tuple(sample_indexes)))
        yield GenerateEvent((_read(request), self.versions.get(replica.name, 0)), ())
        try:
            for index in sample_indexes:
                if self.before_sample is not None:
                    await self.before_sample(replica.name, request, index)
                yield GenerateEvent(None, (self._rollout(replica.name, request, index),))
        except asyncio.CancelledError:
            self.cancelled.append(request.prompt.prompt_id)
            raise

    async def adopt_fleet(self, replicas: Collection[ReplicaInfo]) -> None:
        """Nothing is held."""

    def after_backlog(self, callback: Callable[[], None]) -> None:
        """Nothing lies unread."""
        callback()

    def _rollout(self, name: str, request: GroupRequest, index: int) -> Rollout:
        if self.make is not None:
            return self.make(name, request, index)
        text = answer_text(request.prompt.messages[-1].content, index)
        return rollout_of(text, index, self.versions.get(name, 0), request.sampling.seed, 8)


def _read(request: GroupRequest) -> TokenIds:
    """The prompt, or the turns before and one more token."""
    if request.turn is None or request.turn.earlier is None:
        return PROMPT_TOKENS
    return np.concatenate([request.turn.earlier, PROMPT_TOKENS[:1]])


class InlineScorer:
    """Scores as math_dapo does, without its code and without processes: what follows "Answer:"."""

    busy_seconds, num_asked = 0.0, 0

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored | Failed, ...]:
        """Grade."""
        return tuple(self._score(item) for item in items)

    def _score(self, item: ScorerInput) -> Scored:
        answer = item.response.rpartition("Answer:")[2].strip()
        is_right = answer == item.ground_truth
        score = 1.0 if is_right else -1.0
        return Scored(score, score, {"acc": float(is_right)}, answer)


@asynccontextmanager
async def running_app(
    config: RunConfig,
    client: ScriptedClient,
    sets: PromptSets | None = None,
    files: RunFiles | None = None,
    drivers: EpisodeDrivers | None = None,
) -> AsyncIterator[RewardApp]:
    """The app, by default without a data set and without files, its group loop running."""
    app = RewardApp(config, sets or PromptSets(), InlineScorer(), client, files, drivers)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(app.loop.run())
        yield app
        running.cancel()


def submit(app: RewardApp, contents: Sequence[str], first: int = 0) -> SubmissionSession:
    """Submit prompts ``p<first>``, ... whose reference answer is 1."""
    session = SubmissionSession(app.ledger)
    for number, content in enumerate(contents, first):
        app.submissions.submit(client_prompt(content, f"p{number}"), session)
    return session


async def settled(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let the loop run, and time pass if nothing else can, until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        for turn in itertools.count():
            if condition():
                return
            await asyncio.sleep(0 if turn % 100 else 0.001)


async def publish(app: RewardApp, client: ScriptedClient, version: int) -> None:
    """Replica "a" serves a version, which is announced."""
    client.versions["a"] = version
    await app.loop.announce("trainer", version, [replica("a", version)], None)


async def train(app: RewardApp, client: ScriptedClient, step: int) -> TrainBatch:
    """Take a batch, acknowledge it and publish what it made."""
    batch = await app.loop.batches.take(step, step - 1, 60)
    app.loop.batches.acknowledge(batch.batch_id, step)
    await publish(app, client, step)
    return batch


async def turns(count: int) -> None:
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)
