"""The asynchronous client of a run: generate, submit prompts, score, look at the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from sluice.client.channels import ServiceChannels
from sluice.client.fleet import ClientFleet, FleetLookup, FleetReplica
from sluice.client.generation import ResumableGeneration
from sluice.client.generation_types import (
    GenerateOptions,
    Generation,
    GenerationEvent,
    GenerationStarted,
    Prompt,
    SampleFinished,
)
from sluice.client.policy_client import NewPrompt, PromptEvent
from sluice.client.run_address import RunAddress, address_of_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.client.scoring import MOST_CALLS, ScoreItem, score_items
from sluice.client.submission import submit_prompts
from sluice.errors import ConfigError
from sluice.rpc.retries import RetryPolicy
from sluice.types import Failed, Rollout, Scored, TokenIds

_DEFAULT_OPTIONS = GenerateOptions()
_DEFAULT_POLICY = RetryPolicy()


class AsyncClient:
    """Talks to the services of one run. Use it as an async context manager.

    Failures of services are borne as `policy` says: generation goes on at another replica from the
    tokens that came, prompts are submitted again under their ids, scoring is asked for again.

    Args:
        address: where the run's services listen; see also `connect`.
        name: the client's name for quotas; empty: one of this process (``sluice-client@HOST:PID``),
            which all of its unnamed clients share.
        policy: how failures are borne.
    """

    def __init__(
        self, address: RunAddress, *, name: str = "", policy: RetryPolicy = _DEFAULT_POLICY
    ) -> None:
        self._address, self._policy = address, policy
        self._channels = ServiceChannels(address, name)
        self._monitors = set[RunMonitor]()
        self._score_calls = asyncio.Semaphore(MOST_CALLS)
        self._lookup = FleetLookup(address, self._channels)
        self._generation = ResumableGeneration(ClientFleet(self._lookup), self._channels, policy)

    @classmethod
    def connect(
        cls, run: str | Path, *, name: str = "", policy: RetryPolicy = _DEFAULT_POLICY
    ) -> Self:
        """A client of the run in a folder of this machine (its `sluice.run_dir`).

        Raises:
            ConfigError: nothing was started from there, or the credentials cannot be used.
        """
        return cls(address_of_run(Path(run)), name=name, policy=policy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls and connections; what waits for one raises `asyncio.CancelledError`."""
        await self._channels.close()
        for monitor in list(self._monitors):
            await monitor.close()

    def stream(
        self,
        prompt: Prompt,
        options: GenerateOptions = _DEFAULT_OPTIONS,
        *,
        every_token: bool = True,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Samples responses; their tokens come as they are drawn, then each sample whole.

        Without `every_token` only whole samples come, which costs the replica less.

        Consume it inside `contextlib.aclosing`: leaving early ends the samples and frees their
        slots in the engine.

        Raises:
            InvalidRequestError: the prompt or an option cannot be.
            DeadlineError: `options.deadline_s` has passed.
            SluiceError: no replica served for as long as the policy's patience lasts.
        """
        return self._generation.run(prompt, options, every_token=every_token)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS
    ) -> Generation:
        """Samples responses and waits for all of them. Errors as of `stream`."""
        prompt_token_ids: TokenIds | None = None
        rollouts: list[Rollout] = []
        run = self._generation.run(prompt, options, every_token=False)
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, GenerationStarted) and prompt_token_ids is None:
                    prompt_token_ids = event.prompt_token_ids
                elif isinstance(event, SampleFinished):
                    rollouts.append(event.rollout)
        assert prompt_token_ids is not None  # samples come after it
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
        """Submits prompts to be trained on; yields receipts, and outcomes if they are waited for.

        An outcome tells what became of the prompt and, if it was trained, in which step. Accepted
        prompts stay in the run when the caller leaves early; the same ones submitted again are
        told of again. With `traceparent` (W3C) the run's spans of them are below the caller's span.
        `in_thread` iterates over `prompts` in a thread of its own, so that they may wait for
        something; otherwise the event loop would wait with them.

        Raises:
            InvalidRequestError: `traceparent` is none.
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
        """Grades responses with the run's scorers; one outcome per item, in order.

        Args:
            items: the responses.
            deadline_s: seconds in all, with every retry; none: as long as it takes.

        Raises:
            InvalidRequestError: an item or the deadline cannot be.
            DeadlineError: `deadline_s` has passed, or a single response took over ten minutes.
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

    async def replicas(self) -> Sequence[FleetReplica]:
        """The replicas that serve, asked for anew.

        Raises:
            PeerError: nobody who knows them answers.
        """
        return await self._lookup()

    async def status(self) -> RunSnapshot:
        """Step, phase, version and replicas of the run.

        Raises:
            PeerError, DeadlineError: the trainer does not answer.
        """
        async with self._monitor() as monitor:
            return await monitor.snapshot()

    async def steps(
        self, from_step: int = 0
    ) -> AsyncGenerator[tuple[int, Mapping[str, float]], None]:
        """Finished steps with their metrics until the run ends (0: from now on)."""
        async with self._monitor() as monitor, aclosing(monitor.steps(from_step)) as steps:
            async for step in steps:
                yield step

    @asynccontextmanager
    async def _monitor(self) -> AsyncGenerator[RunMonitor, None]:
        self._channels.check_open()
        if self._address.trainer is None:
            raise ConfigError("client: no address of a trainer; give it, or the run's folder")
        async with RunMonitor(
            self._address.trainer,
            self._reward(),
            max_message_bytes=self._address.max_message_bytes,
            credentials=self._address.credentials,
        ) as monitor:
            self._monitors.add(monitor)
            try:
                yield monitor
            finally:
                self._monitors.discard(monitor)

    def _reward(self) -> str:
        if self._address.reward is None:
            raise ConfigError(
                "client: no address of a reward service; give it, or the run's folder"
            )
        return self._address.reward
