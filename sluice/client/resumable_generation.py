"""Generation that outlives replicas: what one has drawn another continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.client.fleet import Fleet
from sluice.client.generation_progress import GenerationProgress
from sluice.client.generation_types import (
    GenerateOptions,
    GenerationEvent,
    GenerationStarted,
    Prompt,
)
from sluice.client.retries import Retries, RetryPolicy
from sluice.client.service_channels import ServiceChannels
from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    PeerError,
    SluiceError,
)
from sluice.rpc.call import stream_call
from sluice.rpc.stubs import rollout_stub

_PHASE = "generating"
_LONGEST_S = 604_800.0
_FLEET = "the fleet"


class _StallError(PeerError):
    """A replica took a request up, and nothing came."""


class ResumableGeneration:
    """Generates on the replicas of a run.

    Args:
        fleet: chooses the replica for each try.
        channels: to replicas.
        policy: how long failures in a row are borne.
    """

    def __init__(self, fleet: Fleet, channels: ServiceChannels, policy: RetryPolicy) -> None:
        self._fleet, self._channels, self._policy = fleet, channels, policy

    async def run(
        self, prompt: Prompt, options: GenerateOptions, *, every_token: bool
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events until every sample has finished; leaving early ends the samples.

        Raises:
            DeadlineError: `options.deadline_s` has passed.
            SluiceError: the request is refused, or nothing got on for the policy's patience.
        """
        progress = GenerationProgress(prompt, options, every_token=every_token)
        whole_s = options.deadline_s
        retries = Retries(self._policy, None if whole_s is None else time.monotonic() + whole_s)
        moved_because = ""
        full: list[str] = []
        while progress.num_open:
            remaining_s = retries.remaining_s(_FLEET, _PHASE, whole_s)
            num_tokens = progress.num_tokens
            try:
                once = self._once(progress, remaining_s, moved_because, full)
                async with aclosing(once) as events:
                    async for event in events:
                        if isinstance(event, GenerationStarted):
                            retries.answered()
                        else:
                            retries.got_on()
                        yield event
            except SluiceError as error:
                if progress.num_tokens > num_tokens:  # of samples that are told of whole
                    retries.got_on()
                if isinstance(error, _StallError):
                    retries.stalled()
                moved_because = str(error)
                await retries.wait_after(error)

    async def _once(
        self,
        progress: GenerationProgress,
        deadline_s: float | None,
        moved_because: str,
        full: list[str],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """What one replica draws, to its end or failure; one without room joins `full`."""
        address = (await self._fleet.choose(full)).address
        known = progress.num_tokens
        try:
            with self._fleet.occupied(address, progress.num_open):
                stream = self._stream(address, progress, deadline_s)
                async with aclosing(_moving(stream, address, self._policy.stall_s)) as messages:
                    async for message in messages:
                        for event in progress.take(message, address, moved_because):
                            yield event
            if progress.num_open:
                got = progress.num_tokens - known
                detail = f"it ended {progress.num_open} samples early, {got} tokens on"
                raise PeerError(address, _PHASE, detail)
        except ExhaustedError:
            # The next try goes elsewhere. Smaller requests, and others' quotas, may have room.
            full[:] = [each for each in full if each != address] + [address]
            raise
        except SluiceError as error:
            if not _is_callers_doing(error, deadline_s):
                self._fleet.failed(address)
            raise

    def _stream(
        self, address: str, progress: GenerationProgress, deadline_s: float | None
    ) -> AsyncGenerator[rollout.GenerateResponse, None]:
        request = progress.request()
        self._channels.check_size("prompt", request)
        stub = rollout_stub(self._channels.to(address))
        return stream_call(
            self._channels.named(stub.Generate, progress.traceparent),
            request,
            name="RolloutService/Generate",
            peer=address,
            phase=_PHASE,
            deadline_s=min(_LONGEST_S if deadline_s is None else deadline_s, _LONGEST_S),
        )


async def _moving(
    stream: AsyncGenerator[rollout.GenerateResponse, None], address: str, stall_s: float
) -> AsyncGenerator[rollout.GenerateResponse, None]:
    """The messages of a stream. A hung engine leaves its connection as it is, so nothing else ends
    the wait for it; one that is busy with others' samples says so."""
    async with aclosing(stream) as messages:
        while True:
            try:
                async with asyncio.timeout(stall_s):
                    message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                detail = f"it sent neither tokens nor a sign of life for {stall_s:g} s"
                raise _StallError(address, _PHASE, detail) from error
            yield message


def _is_callers_doing(error: SluiceError, deadline_s: float | None) -> bool:
    """A request that cannot be, or a deadline of the caller's that passed, is no failure."""
    if isinstance(error, DeadlineError):
        return deadline_s is not None
    return isinstance(error, InvalidRequestError)
