"""Submit prompts for training and report on each until its end, across restarts of the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sluice.api.reward.v1 import reward_pb2
from sluice.client.channels import ServiceChannels
from sluice.client.generation_types import check_traceparent
from sluice.client.held_prompts import RefusedPrompts
from sluice.client.policy_client import NewPrompt, PromptEvent, prompt_event, prompt_to_proto
from sluice.errors import PeerError, SluiceError
from sluice.rpc.client import reward_stub, stream_call
from sluice.rpc.retries import Retries, RetryPolicy, own_deadline_is_failure

if TYPE_CHECKING:
    from google.protobuf.message import Message


class PromptReader(Protocol):
    """Gives one prompt after another."""

    def is_ready(self) -> bool:
        """Whether `take` has something to give; if not, it is seen to that it will."""

    def take(self) -> NewPrompt | None:
        """The next prompt; ``None`` at the end. Raises what the iterable raised."""

    def close(self) -> None:
        """No more are taken."""


class InlinePromptReader:
    """Draws in the thread that takes: what the iterable waits for, the event loop waits for."""

    def __init__(self, prompts: Iterable[NewPrompt]) -> None:
        self._prompts = iter(prompts)

    def is_ready(self) -> bool:
        """Always."""
        return True

    def take(self) -> NewPrompt | None:
        """Draws it."""
        return next(self._prompts, None)

    def close(self) -> None:
        """Nothing is open."""


class _ReadPrompt(NamedTuple):
    prompt: NewPrompt | None
    failure: Exception | None = None


class ThreadedPromptReader:
    """Draws in a thread of its own, so that the iterable may wait, also for the event loop.

    One prompt is drawn at a time, when it is asked for. Nobody waits for the thread: a draw that
    never ends outlives `close`, and keeps no process from ending.

    Args:
        prompts: iterated by that thread alone.
        on_ready: called in the event loop when a prompt has come, or the end.
    """

    def __init__(self, prompts: Iterable[NewPrompt], on_ready: Callable[[], None]) -> None:
        self._prompts, self._on_ready = prompts, on_ready
        self._asks: SimpleQueue[bool] = SimpleQueue()
        self._has_started, self._is_asked = False, False
        self._pending: _ReadPrompt | None = None

    def is_ready(self) -> bool:
        """Whether one has come; it is asked for if it was not yet."""
        if self._pending is None and not self._is_asked:
            self._start()
            self._is_asked = True
            self._asks.put(True)
        return self._pending is not None

    def take(self) -> NewPrompt | None:
        """The one that has come, after `is_ready`."""
        assert self._pending is not None
        sampled, self._pending = self._pending, None
        if sampled.failure is not None:
            raise sampled.failure
        return sampled.prompt

    def close(self) -> None:
        """The thread ends, at once or after the draw that it is in."""
        self._asks.put(False)

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._read, args=(loop,), name="sluice prompts", daemon=True
        ).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        prompts: Iterator[NewPrompt] | None = None
        while self._asks.get():
            try:
                prompts = iter(self._prompts) if prompts is None else prompts
                sampled = _ReadPrompt(next(prompts, None))
            except BaseException as error:  # noqa: BLE001 - it belongs to who waits
                sampled = _ReadPrompt(None, _chained(error))
            try:
                loop.call_soon_threadsafe(self._put, sampled)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _put(self, sampled: _ReadPrompt) -> None:
        self._pending, self._is_asked = sampled, False
        self._on_ready()


def _chained(error: BaseException) -> Exception:
    """What ends a program must not end the event loop of those who wait."""
    if isinstance(error, Exception):
        return error
    reported = RuntimeError(f"the iterable of prompts raised {type(error).__name__}: {error}")
    reported.__cause__ = error
    return reported


# Prompts submitted for training, each told of until its end, through restarts of the service.
#
# A prompt may be sent again as often as needed: the reward service knows it by its id and its
# content, accepts it once, and repeats its receipt and outcome. One that is refused for want of
# room is sent again once there may be some.

RECEIPTS = ("accepted", "refused")
_WINDOW = 1024
# A share of what a service takes of all clients (512 MiB unless configured otherwise).
_IMAGE_WINDOW_BYTES = 64 << 20
# Receipts echo no more of an id, which is refused if it is longer.
_ECHOED_CHARACTERS = 128
_PHASE = "submitting prompts"
_DEFAULT_POLICY = RetryPolicy()


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
        policy: how prompts are sent again that there was no room for. With outcomes to wait for
            they wait, too; otherwise they are refused when nothing got on for its patience.
        in_thread: iterate over `prompts` in a thread of its own.

    Attributes:
        failure: what taking or encoding a prompt raised; the input ends there.
    """

    def __init__(
        self,
        prompts: Iterable[NewPrompt],
        *,
        until_outcome: bool,
        check_size: Callable[[str, Message], None] = lambda _name, _message: None,
        policy: RetryPolicy = _DEFAULT_POLICY,
        in_thread: bool = False,
    ) -> None:
        self._changed = asyncio.Event()
        self._prompts: PromptReader = (
            ThreadedPromptReader(prompts, self._changed.set)
            if in_thread
            else InlinePromptReader(prompts)
        )
        self._until_outcome, self._check_size = until_outcome, check_size
        self._open: dict[str, _Encoded] = {}
        self._image_bytes = 0
        self._pending: NewPrompt | None = None
        self._reading = asyncio.Lock()
        self._accepted: set[str] = set()
        self._unanswered: set[str] = set()  # sent in this call, without a receipt
        self._held = RefusedPrompts(policy, gives_up=not until_outcome)
        self._is_exhausted, self._num_calls = False, 0
        self.failure: Exception | None = None

    def close(self) -> None:
        """No more prompts are drawn."""
        self._prompts.close()

    def are_done(self) -> bool:
        """Whether nothing is left to send or to wait for."""
        return self._is_exhausted and not self._open

    @property
    def num_open(self) -> int:
        """Prompts sent that are not done with."""
        return len(self._open)

    async def requests(self) -> AsyncGenerator[reward_pb2.SubmitPromptsRequest, None]:
        """What one call sends: all that are open, then those held back and fresh ones as there is
        room, until each has its receipt.

        Ends when those of the next call begin: gRPC may still draw from a call that has failed.
        """
        self._num_calls += 1
        call = self._num_calls
        self._held.forget()
        self._unanswered = set(self._open)
        self._changed.set()
        for sent_before in list(self._open.values()):
            yield sent_before.request
        while (request := await self._next(call)) is not None:
            yield request

    async def _next(self, call: int) -> reward_pb2.SubmitPromptsRequest | None:
        """What is sent next; ``None``: no more, or the call is not the latest."""
        while call == self._num_calls:
            if (prompt_id := self._held.take_due()) is not None:
                self._unanswered.add(prompt_id)
                return self._open[prompt_id].request
            if self._takes_more() and self._has_fresh():
                if (fresh := await self._fresh_one(call)) is not None:
                    return fresh
            elif self._is_exhausted and not self._unanswered and not self._held:
                return None
            else:
                self._changed.clear()
                await self._change(self._held.wait_s())
        return None

    async def _change(self, most_s: float | None) -> None:
        try:
            async with asyncio.timeout(most_s):
                await self._changed.wait()
        except TimeoutError:
            return  # one that is held is due

    def _takes_more(self) -> bool:
        """Fresh ones would be refused, too, while others are held."""
        has_capacity = len(self._open) < _WINDOW and self._image_bytes < _IMAGE_WINDOW_BYTES
        return has_capacity and not self._is_exhausted and not self._held

    def _has_fresh(self) -> bool:
        return self._pending is not None or self._prompts.is_ready()

    async def _fresh_one(self, call: int) -> reward_pb2.SubmitPromptsRequest | None:
        """The next fresh prompt as it is sent; ``None`` where there is none, which ends the input,
        and for a call that is not the latest."""
        async with self._reading:
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
            prompt_id, self._pending = encoded.request.prompt_id[:_ECHOED_CHARACTERS], None
            if prompt_id not in self._open:
                self._open[prompt_id] = encoded
                self._image_bytes += encoded.image_bytes
            self._unanswered.add(prompt_id)
            return encoded.request

    async def _encoded_next(self) -> _Encoded | None:
        """Files are read once, beside the event loop: what is sent again is what was sent."""
        if self._pending is None:
            self._pending = self._prompts.take()
        prompt = self._pending
        if prompt is None:
            return None
        found = await asyncio.to_thread(_encode, prompt) if prompt.images else _encode(prompt)
        self._check_size(f"prompt {prompt.prompt_id}", found.request)
        return found

    def news(self, event: PromptEvent) -> Sequence[PromptEvent]:
        """Takes an event on; gives what it brings that the client was not told before and waits
        for."""
        self._changed.set()
        self._unanswered.discard(event.prompt_id)
        if event.event == "accepted":
            return self._news_of_accepted(event)
        if event.event == "refused":
            return self._news_of_refused(event)
        self._done_with(event.prompt_id)
        self._held.ended()
        return (event,) if self._until_outcome else ()

    def _news_of_accepted(self, event: PromptEvent) -> Sequence[PromptEvent]:
        was_accepted = event.prompt_id in self._accepted
        self._accepted.add(event.prompt_id)
        self._held.accepted(event.prompt_id)
        if not self._until_outcome:
            self._done_with(event.prompt_id)
        return () if was_accepted else (event,)

    def _news_of_refused(self, event: PromptEvent) -> Sequence[PromptEvent]:
        if event.is_retryable and event.prompt_id in self._open:
            given_up = self._held.hold(event)
        else:
            if event.prompt_id in self._accepted:  # a second prompt of the same id
                return (event,)
            given_up = (event,)
        for refused in given_up:
            self._done_with(refused.prompt_id)
        return given_up

    def _done_with(self, prompt_id: str) -> None:
        self._held.drop(prompt_id)
        ended = self._open.pop(prompt_id, None)
        if ended is not None:
            self._image_bytes -= ended.image_bytes


async def submit_prompts(
    channels: ServiceChannels,
    reward: str,
    prompts: Iterable[NewPrompt],
    policy: RetryPolicy,
    *,
    until_outcome: bool,
    traceparent: str = "",
    in_thread: bool = False,
) -> AsyncGenerator[PromptEvent, None]:
    """Submits prompts; yields a receipt for each, and an outcome for each accepted one if wanted.

    At most 1024 are under way at a time, and no further one is sent while those hold images of
    64 MiB or more. Files of images are read once. A failed call is made again with the prompts that
    are not done with, as long as the policy's patience lasts; a call that reached its own deadline
    counts as failed. Prompts that the service has no room for are held back and sent again when an
    outcome made room, or after a pause; no further ones are sent meanwhile. Without outcomes to
    wait for they are refused when nothing got on for the policy's patience. That they wait, and
    what the service said, is logged as a warning at first and then ever more rarely. Accepted
    prompts stay in the run when the caller leaves early.

    Args:
        channels: to the service.
        reward: its address.
        prompts: with different ids; taken as there is room.
        policy: how failures are borne.
        until_outcome: wait for outcomes, too.
        traceparent: the caller's span (W3C), above those of all these prompts; empty: none.
        in_thread: iterate over `prompts` in a thread of its own; else what they wait for, the event
            loop waits for.

    Raises:
        InvalidRequestError: `traceparent` is none.
        CancelledError: the channels were closed meanwhile.
        SluiceError: the service stays away, or refuses the call, or the channels are closed. A
            prompt that it refuses is an event and no error.
    """
    check_traceparent(traceparent)
    open_prompts = OpenPrompts(
        prompts,
        until_outcome=until_outcome,
        check_size=channels.check_size,
        policy=policy,
        in_thread=in_thread,
    )
    with closing(open_prompts):
        async with aclosing(_calls(channels, reward, open_prompts, policy, traceparent)) as events:
            async for event in events:
                yield event


async def _calls(
    channels: ServiceChannels,
    reward: str,
    open_prompts: OpenPrompts,
    policy: RetryPolicy,
    traceparent: str,
) -> AsyncGenerator[PromptEvent, None]:
    """Calls until all prompts are done with; gives what is new in their events."""
    retries = Retries(policy)
    while not open_prompts.are_done():
        try:
            async with aclosing(_one_call(channels, reward, open_prompts, traceparent)) as events:
                async for event in events:
                    retries.answered()
                    for news in open_prompts.news(event):
                        retries.got_on()
                        yield news
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
        try:
            with own_deadline_is_failure():
                async for answer in answers:
                    yield prompt_event(answer)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if channels.is_closed or (task is not None and task.cancelling()):
                raise
            # gRPC itself cancels a call whose connection breaks just when its input ends.
            raise PeerError(reward, _PHASE, "the connection broke off") from error
    if open_prompts.num_open and open_prompts.failure is None:
        detail = f"it ended the call with {open_prompts.num_open} prompts open"
        raise PeerError(reward, _PHASE, detail)
