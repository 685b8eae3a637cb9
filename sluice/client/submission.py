"""Prompts submitted for training, each told of until its end, through restarts of the service.

A prompt may be sent again as often as needed: the reward service knows it by its id and its
content, accepts it once, and repeats its receipt and outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from sluice.api.reward.v1 import reward_pb2
from sluice.client.generation_types import check_traceparent
from sluice.client.policy_client import NewPrompt, PromptEvent, prompt_event, prompt_to_proto
from sluice.client.retries import Retries, RetryPolicy
from sluice.client.service_channels import ServiceChannels
from sluice.errors import PeerError, SluiceError
from sluice.rpc.call import stream_call
from sluice.rpc.stubs import reward_stub

if TYPE_CHECKING:
    from google.protobuf.message import Message

RECEIPTS = ("accepted", "refused")
_WINDOW = 1024
# A share of what a service takes of all clients (512 MiB unless configured otherwise).
_IMAGE_WINDOW_BYTES = 64 << 20
_PHASE = "submitting prompts"


class _Encoded(NamedTuple):
    """A prompt as it is sent, and sent again."""

    request: reward_pb2.SubmitPromptsRequest
    image_bytes: int


def _encode(prompt: NewPrompt) -> _Encoded:
    request = prompt_to_proto(prompt)
    return _Encoded(request, sum(map(len, request.images)))


class OpenPrompts:
    """Prompts on their way: those to send, and those sent that are not done with.

    Args:
        prompts: taken one by one as there is room.
        until_outcome: a prompt is done with when its outcome came; otherwise, with its receipt.
        check_size: refuses a message, by what it holds, that is too large to be sent.

    Attributes:
        failure: what taking or encoding a prompt raised; the input ends there.
    """

    def __init__(
        self,
        prompts: Iterable[NewPrompt],
        *,
        until_outcome: bool,
        check_size: Callable[[str, Message], None] = lambda _name, _message: None,
    ) -> None:
        self._fresh: Iterator[NewPrompt] = iter(prompts)
        self._until_outcome, self._check_size = until_outcome, check_size
        self._open: dict[str, _Encoded] = {}
        self._image_bytes = 0
        self._drawn: NewPrompt | None = None
        self._drawing = asyncio.Lock()
        self._accepted: set[str] = set()
        self._has_room = asyncio.Event()
        self._is_exhausted, self._num_calls = False, 0
        self.failure: Exception | None = None

    def are_done(self) -> bool:
        """Whether nothing is left to send or to wait for."""
        return self._is_exhausted and not self._open

    @property
    def num_open(self) -> int:
        """Prompts sent that are not done with."""
        return len(self._open)

    async def requests(self) -> AsyncGenerator[reward_pb2.SubmitPromptsRequest, None]:
        """What one call sends: all that are open, then fresh ones as there is room.

        Ends when those of the next call begin: gRPC may still draw from a call that has failed.
        """
        self._num_calls += 1
        call = self._num_calls
        self._has_room.set()
        for sent_before in list(self._open.values()):
            yield sent_before.request
        while (request := await self._next(call)) is not None:
            yield request
            while call == self._num_calls and not self._takes_more():
                self._has_room.clear()
                await self._has_room.wait()

    def _takes_more(self) -> bool:
        return len(self._open) < _WINDOW and self._image_bytes < _IMAGE_WINDOW_BYTES

    async def _next(self, call: int) -> reward_pb2.SubmitPromptsRequest | None:
        """The next fresh prompt as it is sent; ``None`` where there is none, which ends the input,
        and for a call that is not the latest."""
        async with self._drawing:
            if call != self._num_calls:
                return None
            try:
                encoded = await self._encoded_next()
            except Exception as error:  # noqa: BLE001 - raised by the caller, outside of gRPC's task
                self.failure, encoded = error, None
            if encoded is None:
                self._is_exhausted = True
                return None
            if call != self._num_calls:
                return None  # the latest call draws it
            prompt_id, self._drawn = encoded.request.prompt_id, None
            if prompt_id not in self._open:
                self._open[prompt_id] = encoded
                self._image_bytes += encoded.image_bytes
            return encoded.request

    async def _encoded_next(self) -> _Encoded | None:
        """Files are read once, beside the event loop: what is sent again is what was sent."""
        if self._drawn is None:
            self._drawn = next(self._fresh, None)
        prompt = self._drawn
        if prompt is None:
            return None
        found = await asyncio.to_thread(_encode, prompt) if prompt.images else _encode(prompt)
        self._check_size(f"prompt {prompt.prompt_id}", found.request)
        return found

    def is_news(self, event: PromptEvent) -> bool:
        """Takes an event on; false for what the client was told before or does not wait for."""
        was_accepted = event.prompt_id in self._accepted
        if event.event == "accepted":
            self._accepted.add(event.prompt_id)
            if not self._until_outcome:
                self._done_with(event.prompt_id)
            return not was_accepted
        if event.event == "refused" and was_accepted:  # a second prompt of the same id
            return True
        self._done_with(event.prompt_id)
        return event.event == "refused" or self._until_outcome

    def _done_with(self, prompt_id: str) -> None:
        ended = self._open.pop(prompt_id, None)
        if ended is not None:
            self._image_bytes -= ended.image_bytes
        self._has_room.set()


async def submit_prompts(
    channels: ServiceChannels,
    reward: str,
    prompts: Iterable[NewPrompt],
    policy: RetryPolicy,
    *,
    until_outcome: bool,
    traceparent: str = "",
) -> AsyncGenerator[PromptEvent, None]:
    """Submits prompts; yields a receipt for each, and an outcome for each accepted one if wanted.

    At most 1024 are under way at a time, and no further one is sent while those hold images of
    64 MiB or more. Files of images are read once. A failed call is made again with the prompts that
    are not done with, as long as the policy's patience lasts. Accepted prompts stay in the run when
    the caller leaves early.

    Args:
        channels: to the service.
        reward: its address.
        prompts: with different ids; taken as there is room.
        policy: how failures are borne.
        until_outcome: wait for outcomes, too.
        traceparent: the caller's span (W3C), above those of all these prompts; empty: none.

    Raises:
        InvalidRequestError: `traceparent` is none.
        SluiceError: the service stays away, or refuses the call. A prompt that it refuses is an
            event and no error.
    """
    check_traceparent(traceparent)
    open_prompts = OpenPrompts(prompts, until_outcome=until_outcome, check_size=channels.check_size)
    retries = Retries(policy)
    while not open_prompts.are_done():
        try:
            async with aclosing(_one_call(channels, reward, open_prompts, traceparent)) as events:
                async for event in events:
                    retries.answered()
                    if open_prompts.is_news(event):
                        retries.got_on()
                        yield event
                    if open_prompts.are_done():
                        break
        except SluiceError as error:
            if open_prompts.failure is None:
                await retries.wait_after(error)
        if open_prompts.failure is not None:
            raise open_prompts.failure


async def _one_call(
    channels: ServiceChannels, reward: str, open_prompts: OpenPrompts, traceparent: str
) -> AsyncGenerator[PromptEvent, None]:
    stub = reward_stub(channels.to(reward))
    stream = stream_call(
        channels.named(stub.SubmitPrompts, traceparent),
        open_prompts.requests(),
        name="RewardService/SubmitPrompts",
        peer=reward,
        phase=_PHASE,
    )
    async with aclosing(stream) as answers:
        async for answer in answers:
            yield prompt_event(answer)
    if open_prompts.num_open and open_prompts.failure is None:
        detail = f"it ended the call with {open_prompts.num_open} prompts open"
        raise PeerError(reward, _PHASE, detail)
