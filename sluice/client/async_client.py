"""The asynchronous client of a run: generate, submit prompts, score, and look at the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Self

from sluice.client.channels import ServiceChannels
from sluice.client.fleet import ClientFleet, FleetReplica, look_up_replicas
from sluice.client.generation import ResumableGeneration
from sluice.client.generation_types import (
    GenerateOptions,
    Generation,
    GenerationEvent,
    GenerationStarted,
    Prompt,
    SampleFinished,
)
from sluice.client.leases import Leases
from sluice.client.run_address import RunAddress, address_of_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.client.scoring import MAX_CALLS, ScoreItem, score_items
from sluice.client.submission import NewPrompt, PromptEvent, submit_prompts
from sluice.errors import ConfigError
from sluice.rpc.retries import RetryPolicy
from sluice.types import Failed, Rollout, Scored, TokenIds

_DEFAULT_OPTIONS = GenerateOptions()
_DEFAULT_POLICY = RetryPolicy()


class AsyncClient:
    """A client of the services of one run. Use it as an async context manager.

    It waits out failures of services: another replica continues a generation from the tokens that
    came, prompts are submitted again under their ids, and scoring is repeated.

    Args:
        address: where the run's services listen; see also `connect`.
        name: the client's name for quotas; empty: one that all unnamed clients of this process
            share (``sluice-client@HOST:PID``).
        policy: how failures are retried.
    """

    def __init__(
        self, address: RunAddress, *, name: str = "", policy: RetryPolicy = _DEFAULT_POLICY
    ) -> None:
        self._address = address
        self._policy = policy
        self._channels = ServiceChannels(address, name)
        self._score_calls = asyncio.Semaphore(MAX_CALLS)
        self._look_up = partial(look_up_replicas, address, self._channels)
        self._generation = ResumableGeneration(ClientFleet(self._look_up), self._channels, policy)

    @classmethod
    def connect(
        cls, run: str | Path, *, name: str = "", policy: RetryPolicy = _DEFAULT_POLICY
    ) -> Self:
        """Return a client of the run in a folder of this machine (its `sluice.run_dir`).

        Raises:
            ConfigError: nothing was started from there, or the credentials cannot be used.
        """
        return cls(address_of_run(Path(run)), name=name, policy=policy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls and connections. Their callers get `asyncio.CancelledError`."""
        await self._channels.close()

    def stream(
        self,
        prompt: Prompt,
        options: GenerateOptions = _DEFAULT_OPTIONS,
        *,
        every_token: bool = True,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Sample responses. Yield their tokens as they come, then each sample whole.

        Without `every_token` only whole samples come, which costs the replica less.

        Consume it inside `contextlib.aclosing`: leaving early ends the samples and frees their
        slots in the engine.

        Raises:
            InvalidRequestError: the prompt or an option is not valid.
            DeadlineError: `options.deadline_s` has passed.
            SluiceError: no replica served for the policy's patience.
        """
        return self._generation.run(prompt, options, every_token=every_token)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS
    ) -> Generation:
        """Sample responses and wait for all of them. Raises the errors of `stream`."""
        prompt_token_ids: TokenIds | None = None
        rollouts: list[Rollout] = []
        run = self._generation.run(prompt, options, every_token=False)
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, GenerationStarted) and prompt_token_ids is None:
                    prompt_token_ids = event.prompt_token_ids
                elif isinstance(event, SampleFinished):
                    rollouts.append(event.rollout)
        assert prompt_token_ids is not None  # it comes before all samples
        rollouts.sort(key=lambda rollout: rollout.sample_index)
        return Generation(prompt_token_ids, tuple(rollouts))

    def submit(
        self,
        prompts: Iterable[NewPrompt],
        *,
        until_outcome: bool = True,
        traceparent: str = "",
        in_thread: bool = False,
    ) -> AsyncGenerator[PromptEvent, None]:
        """Submit prompts to train on. Yield receipts, and outcomes with `until_outcome`.

        The prompts have different ids. An outcome reports how the prompt ended and, if it was
        trained, in which step; a refused prompt is an event and no error. Accepted prompts stay in
        the run when the caller leaves early; submit them again to get their events again. With
        `traceparent` (W3C) the run's spans of them are below the caller's span.
        `in_thread` iterates over `prompts` in a thread of its own, so that the iterable may wait;
        otherwise the event loop waits with it.

        Raises:
            InvalidRequestError: `traceparent` is no trace context.
            SluiceError: the reward service refuses the call, or stays away.
        """
        return submit_prompts(
            self._channels,
            self._reward(),
            prompts,
            self._policy,
            until_outcome=until_outcome,
            traceparent=traceparent,
            in_thread=in_thread,
        )

    async def score(
        self, items: Sequence[ScoreItem], *, deadline_s: float | None = None
    ) -> list[Scored | Failed]:
        """Grade responses with the run's scorers; return one outcome per item, in order.

        Args:
            items: the responses.
            deadline_s: seconds in all, with every retry; None: as long as it takes.

        Raises:
            InvalidRequestError: an item or the deadline is not valid.
            DeadlineError: `deadline_s` has passed, or 16 responses took over two hours.
            SluiceError: the reward service refuses the call, or stays away.
        """
        return await score_items(
            self._channels,
            self._reward(),
            items,
            self._policy,
            calls=self._score_calls,
            deadline_s=deadline_s,
        )

    def leases(self) -> Leases:
        """Return the samples of a run with `sluice.environment.agents`, for programs."""
        return Leases(self._channels, self._reward(), self._policy)

    async def replicas(self) -> Sequence[FleetReplica]:
        """Look up the replicas that serve.

        Raises:
            PeerError: no service that knows them answers.
        """
        return await self._look_up()

    async def status(self) -> RunSnapshot:
        """Return step, phase, version and replicas of the run.

        Raises:
            PeerError, DeadlineError: the trainer does not answer.
        """
        return await self._run().snapshot()

    async def steps(
        self, from_step: int = 0
    ) -> AsyncGenerator[tuple[int, Mapping[str, float]], None]:
        """Yield finished steps with their metrics until the run ends (0: from now on)."""
        async with aclosing(self._run().steps(from_step)) as steps:
            async for step in steps:
                yield step

    def _run(self) -> RunMonitor:
        self._channels.check_open()
        if self._address.trainer is None:
            raise ConfigError("client: no address of a trainer; give it, or the run's folder")
        return RunMonitor(self._address.trainer, self._reward(), channels=self._channels)

    def _reward(self) -> str:
        if self._address.reward is None:
            raise ConfigError(
                "client: no address of a reward service; give it, or the run's folder"
            )
        return self._address.reward
