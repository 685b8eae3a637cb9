"""Submit prompts for training and report each one's events until its end, across restarts.

A prompt may be sent again as often as needed: the reward service knows it by its id and content,
accepts it once, and repeats its receipt and outcome. A prompt that it refuses because it is full is
held (`RefusedPrompts`) and sent again later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from sluice.api.reward.v1 import reward_pb2
from sluice.client.channels import ServiceChannels
from sluice.client.generation_types import (
    ChatWithImages,
    Image,
    check_traceparent,
    encode_images,
)
from sluice.codec.fields import valid_unicode
from sluice.codec.messages import struct_to_proto
from sluice.codec.rollout import chat_prompt_to_proto
from sluice.concurrency.threads import settle
from sluice.errors import PeerError, SluiceError
from sluice.rpc.client import reward_stub, stream_call
from sluice.rpc.retries import Retries, RetryPolicy, own_deadline_is_failure
from sluice.types import ChatMessage

if TYPE_CHECKING:
    from google.protobuf.message import Message

logger = logging.getLogger(__name__)

# Open prompts: they keep a service busy, and a broken call repeats them all.
_WINDOW = 1024
# A share of what a service takes of all clients (512 MiB unless configured otherwise).
_IMAGE_WINDOW_BYTES = 64 << 20
# Receipts repeat no more of an id. A longer one is refused.
_ECHOED_CHARACTERS = 128
_PHASE = "submitting prompts"
_DEFAULT_POLICY = RetryPolicy()
_Read = Future["NewPrompt | None"]
_WARNING_PAUSE_S = 600.0
_MAX_CHARS = 500
# However short a policy's pauses are, a full service is not called in a tight loop.
_MIN_PAUSE_S = 0.025


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt to train on; `prompt_id` is unique in the run.

    `images` are encoded files (PNG, JPEG or WebP) or their paths, one for each ``<image>`` in the
    messages.
    `extra_info` is for the scorer: texts, finite numbers, lists and mappings with texts as keys.
    """

    prompt_id: str
    messages: tuple[ChatMessage, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)
    images: Sequence[Image] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """A receipt (``accepted``, ``refused``) or an outcome (``trained``, ``filtered_...``, ...).

    `is_retryable`: the service was full, and will have capacity as prompts end.
    """

    prompt_id: str
    event: str
    step: int | None
    rewards: tuple[float, ...]
    detail: str
    is_retryable: bool = False


def prompt_to_proto(prompt: NewPrompt) -> reward_pb2.SubmitPromptsRequest:
    """Encode a prompt to train on.

    Raises:
        InvalidRequestError: a text is not valid Unicode, `extra_info` cannot be sent, or an image
            is none.
        DataError: the file of an image cannot be read.
    """
    owner = f"prompt {prompt.prompt_id}"
    chat = ChatWithImages(prompt.messages, prompt.images)
    with valid_unicode(owner):
        return reward_pb2.SubmitPromptsRequest(
            prompt_id=prompt.prompt_id,
            messages=chat_prompt_to_proto(prompt.messages).chat.messages,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=struct_to_proto(prompt.extra_info, f"{owner}: extra_info"),
            images=encode_images(owner, chat),
        )


def prompt_event(answer: reward_pb2.SubmitPromptsResponse) -> PromptEvent:
    """Decode a receipt or an outcome."""
    if answer.WhichOneof("event") == "receipt":
        receipt = answer.receipt
        event = "refused" if receipt.refused_because else "accepted"
        return PromptEvent(
            receipt.prompt_id, event, None, (), receipt.refused_because, receipt.retryable
        )
    outcome = answer.outcome
    name = reward_pb2.PromptEnd.Name(outcome.end).removeprefix("PROMPT_END_").lower()
    step = outcome.step if outcome.HasField("step") else None
    return PromptEvent(outcome.prompt_id, name, step, tuple(outcome.rewards), outcome.detail)


class RefusedPrompts:
    """Prompts that a full service refused, by id, the longest held first.

    One held prompt is sent again for each prompt that is accepted or ends, since each
    shows capacity, and one after each pause, because other clients' prompts end too. The pause
    grows until one is accepted or ends. So vain tries are at most one for each of these; prompts
    that were in flight when the service became full, and all open ones after a broken call, add
    one each.

    Args:
        policy: the pauses, and with `gives_up` the patience without progress.
        gives_up: give prompts up when patience has ended; otherwise hold them until they are
            accepted. A policy without patience gives up at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        gives_up: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._gives_up = gives_up or policy.patience_s <= 0
        self._refusals: dict[str, PromptEvent] = {}
        self._capacity = 0
        self._num_pauses = 0
        self._next_pause_ends_s = 0.0
        self._full_since_s: float | None = None
        self._next_warning_s = -math.inf

    def __len__(self) -> int:
        return len(self._refusals)

    def hold(self, refusal: PromptEvent) -> Sequence[PromptEvent]:
        """Hold a refused prompt, and return all that are given up."""
        now_s = self._clock()
        if self._full_since_s is None:
            self._full_since_s, self._num_pauses = now_s, 0
            if not self._refusals:
                self._next_pause_ends_s = now_s + self._pause_s()
        self._refusals[refusal.prompt_id] = refusal
        if not self._gives_up or now_s - self._full_since_s < self._policy.patience_s:
            self._warn(refusal.detail, now_s, now_s - self._full_since_s)
            return ()
        given_up = tuple(self._refusals.values())
        self._refusals.clear()
        return given_up

    def drop(self, prompt_id: str) -> None:
        """Forget a prompt that is done."""
        self._refusals.pop(prompt_id, None)

    def note_progress(self) -> None:
        """Note that a prompt, held before or not, was accepted or has ended."""
        self._full_since_s = None
        if self._refusals:
            self._capacity += 1

    def forget(self) -> None:
        """Forget all held prompts: a new call sends them again."""
        self._full_since_s = None
        self._refusals.clear()

    def take_due(self) -> str | None:
        """Release the prompt to send again now and return its id; ``None``: there is none."""
        if not self._refusals:
            self._capacity = 0
            return None
        now_s = self._clock()
        if self._capacity > 0:
            self._capacity -= 1
        elif now_s >= self._next_pause_ends_s:
            self._num_pauses += 1
            self._next_pause_ends_s = now_s + self._pause_s()
        else:
            return None
        prompt_id = next(iter(self._refusals))
        del self._refusals[prompt_id]
        return prompt_id

    def wait_s(self) -> float | None:
        """Return the seconds until a prompt is due if nothing happens; ``None``: none is held."""
        if not self._refusals:
            return None
        return max(self._next_pause_ends_s - self._clock(), 0.0)

    def _pause_s(self) -> float:
        return max(self._policy.pause_s(self._num_pauses), _MIN_PAUSE_S)

    def _warn(self, detail: str, now_s: float, full_for_s: float) -> None:
        """Warn at the first held prompt, then every ten minutes."""
        if now_s < self._next_warning_s:
            return
        self._next_warning_s = now_s + _WARNING_PAUSE_S
        # A terminal may show the service's text, so it must be printable.
        printable = "".join(c if c.isprintable() else " " for c in detail[:_MAX_CHARS])
        logger.warning(
            "prompts that wait for capacity: %d; no progress for %.0f s; the service: %s",
            len(self),
            full_for_s,
            printable,
        )


class _PromptReader:
    """Prompts of an iterable, read one at a time, on demand.

    With `in_thread` a thread of its own iterates, so that the iterable may wait; otherwise the
    event loop waits with it. Nothing waits for the thread: a read that never ends outlives
    `close`, and does not keep the process from ending.

    Args:
        prompts: iterated by one thread alone.
        on_ready: called in the event loop when the thread has read a prompt, or the end.
    """

    def __init__(
        self, prompts: Iterable[NewPrompt], on_ready: Callable[[], None], *, in_thread: bool
    ) -> None:
        self._prompts = prompts
        self._iterator: Iterator[NewPrompt] | None = None
        self._on_ready = on_ready
        self._in_thread = in_thread
        self._demands: SimpleQueue[_Read | None] | None = None
        self._read: _Read | None = None

    def is_ready(self) -> bool:
        """Return whether a prompt, or the end, has come. If not, start to read it."""
        if self._read is None:
            self._read = Future()
            if not self._in_thread:
                settle(self._read, self._next)
            else:
                self._demands = self._demands or self._start()
                self._demands.put(self._read)
        return self._read.done()

    def take(self) -> NewPrompt | None:
        """Return the prompt that has come; ``None`` at the end. Raise what the iterable raised.

        Call it only when `is_ready`.
        """
        assert self._read is not None
        demand, self._read = self._read, None
        return demand.result()

    def close(self) -> None:
        """End the thread, at once or after its present read."""
        if self._demands is not None:
            self._demands.put(None)

    def _next(self) -> NewPrompt | None:
        if self._iterator is None:
            self._iterator = iter(self._prompts)
        return next(self._iterator, None)

    def _next_in_thread(self) -> NewPrompt | None:
        try:
            return self._next()
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit: not for the event loop
            kind = type(error).__name__
            raise RuntimeError(f"the iterable of prompts raised {kind}: {error}") from error

    def _start(self) -> SimpleQueue[_Read | None]:
        demands: SimpleQueue[_Read | None] = SimpleQueue()
        loop = asyncio.get_running_loop()

        def serve() -> None:
            while (read := demands.get()) is not None:
                settle(read, self._next_in_thread)
                try:
                    loop.call_soon_threadsafe(self._on_ready)
                except RuntimeError:  # the loop is closed: nothing waits any more
                    return

        threading.Thread(target=serve, name="sluice prompts", daemon=True).start()
        return demands


def _image_bytes(request: reward_pb2.SubmitPromptsRequest) -> int:
    return sum(map(len, request.images))


class OpenPrompts:
    """The prompts of one submission: those to send, and those sent that are not done.

    Args:
        prompts: read one by one as capacity allows.
        until_outcome: a prompt is done with its outcome; otherwise, with its receipt.
        check_size: refuses a named message that is too large to be sent.
        policy: when to send prompts again that a full service refused. With `until_outcome` they
            wait without end; otherwise they are refused after its patience without progress.
        in_thread: iterate over `prompts` in a thread of its own.

    Attributes:
        failure: what reading or encoding a prompt raised; the input ends there.
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
        self._prompts = _PromptReader(prompts, self._changed.set, in_thread=in_thread)
        self._until_outcome = until_outcome
        self._check_size = check_size
        self._open: dict[str, reward_pb2.SubmitPromptsRequest] = {}
        self._image_bytes = 0
        self._pending: NewPrompt | None = None
        self._reading = asyncio.Lock()
        self._accepted: set[str] = set()
        self._unanswered: set[str] = set()  # sent in this call, without a receipt
        self._held = RefusedPrompts(policy, gives_up=not until_outcome)
        self._is_exhausted = False
        self._num_calls = 0
        self.failure: Exception | None = None

    def close(self) -> None:
        """Read no more prompts."""
        self._prompts.close()

    def are_done(self) -> bool:
        """Return whether nothing is left to send or to wait for."""
        return self._is_exhausted and not self._open

    @property
    def num_open(self) -> int:
        """Return how many sent prompts are not done."""
        return len(self._open)

    async def requests(self) -> AsyncGenerator[reward_pb2.SubmitPromptsRequest, None]:
        """Yield what one call sends, until each prompt has its receipt.

        These are all open prompts, then held and fresh ones as capacity allows. The generator ends
        when the next call's begins, because gRPC may still read from a call that has failed.
        """
        self._num_calls += 1
        call = self._num_calls
        # The call repeats every open prompt, so held ones need no other try.
        self._held.forget()
        self._unanswered = set(self._open)
        self._changed.set()
        for sent_before in list(self._open.values()):
            yield sent_before
        while (request := await self._next(call)) is not None:
            yield request

    async def _next(self, call: int) -> reward_pb2.SubmitPromptsRequest | None:
        """Return what to send next; ``None``: nothing more, or the call is not the latest."""
        while call == self._num_calls:
            if (prompt_id := self._held.take_due()) is not None:
                self._unanswered.add(prompt_id)
                return self._open[prompt_id]
            # While prompts are held, the service would refuse fresh ones too.
            has_capacity = len(self._open) < _WINDOW and self._image_bytes < _IMAGE_WINDOW_BYTES
            takes_more = has_capacity and not self._is_exhausted and not self._held
            if takes_more and (self._pending is not None or self._prompts.is_ready()):
                if (fresh := await self._fresh_request(call)) is not None:
                    return fresh
            elif self._is_exhausted and not self._unanswered and not self._held:
                return None
            else:
                # Receipts, outcomes and fresh prompts set the event.
                self._changed.clear()
                await self._change(self._held.wait_s())
        return None

    async def _change(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return  # a held prompt is due

    async def _fresh_request(self, call: int) -> reward_pb2.SubmitPromptsRequest | None:
        """Return the next fresh prompt; ``None`` at the end, or if the call is not the latest."""
        async with self._reading:
            if call != self._num_calls:
                return None
            try:
                encoded = await self._encode_next()
            except Exception as error:  # noqa: BLE001 - raised by the caller, outside of gRPC's task
                self.failure, encoded = error, None
            if encoded is None:
                self._is_exhausted = True
                return None
            if call != self._num_calls:
                return None  # the latest call sends it
            # Events have the shortened id, so it is the key here, too.
            prompt_id = encoded.prompt_id[:_ECHOED_CHARACTERS]
            self._pending = None
            if prompt_id not in self._open:
                self._open[prompt_id] = encoded
                self._image_bytes += _image_bytes(encoded)
            self._unanswered.add(prompt_id)
            return encoded

    async def _encode_next(self) -> reward_pb2.SubmitPromptsRequest | None:
        if self._pending is None:
            self._pending = self._prompts.take()
        prompt = self._pending
        if prompt is None:
            return None
        # Image files are read once, in a thread, so that every try sends the same bytes.
        if prompt.images:
            message = await asyncio.to_thread(prompt_to_proto, prompt)
        else:
            message = prompt_to_proto(prompt)
        self._check_size(f"prompt {prompt.prompt_id}", message)
        return message

    def new_events(self, event: PromptEvent) -> Sequence[PromptEvent]:
        """Take an event, and return those that are new to the client and that it waits for."""
        self._changed.set()
        self._unanswered.discard(event.prompt_id)
        if event.event == "accepted":
            return self._new_events_of_accepted(event)
        if event.event == "refused":
            return self._new_events_of_refused(event)
        self._end(event.prompt_id)
        self._held.note_progress()
        return (event,) if self._until_outcome else ()

    def _new_events_of_accepted(self, event: PromptEvent) -> Sequence[PromptEvent]:
        was_accepted = event.prompt_id in self._accepted
        self._accepted.add(event.prompt_id)
        self._held.note_progress()
        if not self._until_outcome:
            self._end(event.prompt_id)
        return () if was_accepted else (event,)

    def _new_events_of_refused(self, event: PromptEvent) -> Sequence[PromptEvent]:
        if event.is_retryable and event.prompt_id in self._open:
            given_up = self._held.hold(event)
        else:
            if event.prompt_id in self._accepted:  # a second prompt of the same id
                return (event,)
            given_up = (event,)
        for refused in given_up:
            self._end(refused.prompt_id)
        return given_up

    def _end(self, prompt_id: str) -> None:
        self._held.drop(prompt_id)
        request = self._open.pop(prompt_id, None)
        if request is not None:
            self._image_bytes -= _image_bytes(request)


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
    """Submit prompts for `AsyncClient.submit`, which has the arguments and errors.

    At most 1024 prompts are open at a time, and no further one is sent while those hold images of
    64 MiB or more. Image files are read once. A failed call is repeated with the open prompts for
    the policy's patience; a call that reached its own deadline counts as failed. Prompts that a
    full service refused are sent again; see `RefusedPrompts`. No fresh ones are sent meanwhile.
    Without outcomes to wait for, they are refused when nothing came for the policy's patience.
    """
    check_traceparent(traceparent)
    open_prompts = OpenPrompts(
        prompts,
        until_outcome=until_outcome,
        check_size=channels.check_size,
        policy=policy,
        in_thread=in_thread,
    )
    retries = Retries(policy, reward, _PHASE)
    with closing(open_prompts):
        while not open_prompts.are_done():
            call = _submit_in_one_call(channels, reward, open_prompts, traceparent)
            try:
                async with aclosing(call) as events:
                    async for event in events:
                        retries.note_accepted()
                        for news in open_prompts.new_events(event):
                            retries.note_progress()
                            yield news
                        if open_prompts.are_done():
                            break
            except SluiceError as error:
                if open_prompts.failure is None:
                    await retries.wait_after(error)
            if open_prompts.failure is not None:
                raise open_prompts.failure


async def _submit_in_one_call(
    channels: ServiceChannels, reward: str, open_prompts: OpenPrompts, traceparent: str
) -> AsyncGenerator[PromptEvent, None]:
    stub = reward_stub(channels.to(reward))
    stream = stream_call(
        stub.SubmitPrompts,
        open_prompts.requests(),
        name="RewardService/SubmitPrompts",
        peer=reward,
        phase=_PHASE,
        traceparent=traceparent,
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
            # gRPC cancels a call whose connection breaks just when its input ends.
            raise PeerError(reward, _PHASE, "the connection broke off") from error
    if open_prompts.num_open and open_prompts.failure is None:
        detail = f"it ended the call with {open_prompts.num_open} prompts open"
        raise PeerError(reward, _PHASE, detail)
