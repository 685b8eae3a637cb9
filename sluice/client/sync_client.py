"""`AsyncClient` for programs without an event loop: a thread of its own runs the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from sluice.client.async_client import AsyncClient
from sluice.client.fleet import FleetReplica
from sluice.client.generation_types import GenerateOptions, Generation, GenerationEvent, Prompt
from sluice.client.run_address import RunAddress, address_of_run
from sluice.client.run_monitor import RunSnapshot
from sluice.client.scoring import ScoreItem
from sluice.client.submission import NewPrompt, PromptEvent
from sluice.errors import ConfigError
from sluice.rpc.retries import RetryPolicy
from sluice.types import Failed, Scored

ValueT = TypeVar("ValueT")

_DEFAULT_OPTIONS = GenerateOptions()
_DEFAULT_POLICY = RetryPolicy()
_CLOSE_S = 5.0


class Client:
    """`AsyncClient` for synchronous programs. Use it as a context manager, from any thread.

    Takes the arguments and raises the errors of `AsyncClient`. Closing an iterator ends its call.
    Leaving a ``for`` over it does so, too, once Python collects it; `contextlib.closing` does so at
    once.
    """

    def __init__(
        self, address: RunAddress, *, name: str = "", policy: RetryPolicy = _DEFAULT_POLICY
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sluice client", daemon=True
        )
        self._thread.start()
        self._client = self._wait(_open_client(address, name, policy))

    @classmethod
    def connect(
        cls, run: str | Path, *, name: str = "", policy: RetryPolicy = _DEFAULT_POLICY
    ) -> Self:
        """Return a client of the run in a folder of this machine."""
        return cls(address_of_run(Path(run)), name=name, policy=policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls, connections and the thread. A second call does nothing.

        Unfinished calls of other threads raise `concurrent.futures.CancelledError`.
        """
        if self._loop.is_closed():
            return
        self._wait(_end_client(self._client))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stream(
        self,
        prompt: Prompt,
        options: GenerateOptions = _DEFAULT_OPTIONS,
        *,
        every_token: bool = True,
    ) -> Generator[GenerationEvent, None, None]:
        """Sample responses, as `AsyncClient.stream`."""
        return self._iterate(self._client.stream(prompt, options, every_token=every_token))

    def generate(self, prompt: Prompt, options: GenerateOptions = _DEFAULT_OPTIONS) -> Generation:
        """Sample responses and wait for all of them."""
        return self._wait(self._client.generate(prompt, options))

    def submit(
        self,
        prompts: Iterable[NewPrompt],
        *,
        until_outcome: bool = True,
        traceparent: str = "",
    ) -> Generator[PromptEvent, None, None]:
        """Submit prompts to train on, as `AsyncClient.submit`.

        `prompts` is iterated in a thread of its own: it may wait, and call this client.
        """
        return self._iterate(
            self._client.submit(
                prompts, until_outcome=until_outcome, traceparent=traceparent, in_thread=True
            )
        )

    def score(
        self, items: Sequence[ScoreItem], *, deadline_s: float | None = None
    ) -> list[Scored | Failed]:
        """Grade responses; return one outcome per item, in order."""
        return self._wait(self._client.score(items, deadline_s=deadline_s))

    def replicas(self) -> Sequence[FleetReplica]:
        """Look up the replicas that serve."""
        return self._wait(self._client.replicas())

    def status(self) -> RunSnapshot:
        """Return step, phase, version and replicas of the run."""
        return self._wait(self._client.status())

    def steps(self, from_step: int = 0) -> Generator[tuple[int, Mapping[str, float]], None, None]:
        """Yield finished steps with their metrics until the run ends (0: from now on)."""
        return self._iterate(self._client.steps(from_step))

    def _wait(self, work: Coroutine[object, object, ValueT]) -> ValueT:
        if self._loop.is_closed():
            work.close()
            raise ConfigError("client: it is closed; open another one")
        if self._is_own_thread():
            work.close()
            raise ConfigError(
                "client: it was called in its own thread, which would wait for itself; call it "
                "from another one, or use AsyncClient"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        # An interrupt of this thread, such as Ctrl-C, must end the call in the other one.
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, events: AsyncGenerator[ValueT, None]) -> Generator[ValueT, None, None]:
        async def following() -> ValueT:
            return await anext(events)

        try:
            while True:
                try:
                    yield self._wait(following())
                except StopAsyncIteration:
                    return
        finally:
            if self._is_own_thread():  # collected in the loop's thread, which must not wait
                asyncio.run_coroutine_threadsafe(_close_events(events), self._loop)
            elif not self._loop.is_closed():
                self._wait(_close_events(events))

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread


async def _open_client(address: RunAddress, name: str, policy: RetryPolicy) -> AsyncClient:
    # Channels belong to the loop that they are opened in.
    return AsyncClient(address, name=name, policy=policy)


async def _end_client(client: AsyncClient) -> None:
    # A loop that stops would leave the callers of unfinished calls waiting.
    under_way = asyncio.all_tasks() - {asyncio.current_task()}
    for task in under_way:
        task.cancel()
    if under_way:
        await asyncio.wait(under_way, timeout=_CLOSE_S)
    await client.close()


async def _close_events(events: AsyncGenerator[ValueT, None]) -> None:
    await events.aclose()
