"""Calls to one reward service: submit prompts over one stream, ask for a validation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from google.protobuf import struct_pb2

from sluice.api.reward.v1 import reward_pb2
from sluice.client.generation_types import ChatWithImages, Image, encoded_images
from sluice.codec.rollout import chat_prompt_to_proto
from sluice.concurrency.deadlines import while_progressing
from sluice.errors import DeadlineError, InvalidRequestError, PeerError
from sluice.rpc.client import open_channel, reward_stub, stream_call, unary_call
from sluice.rpc.credentials import OPEN, Credentials
from sluice.types import ChatMessage

# A group of the longest responses may take this long; a service that has died is noticed at once.
_STALL_S = 1800.0
_LOOK_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt to be trained on; `prompt_id` is unique in the run.

    `images` are encoded files (PNG, JPEG or WebP) or the paths of such, one for each ``<image>`` in
    the messages.
    `extra_info` goes to the scorer: texts, finite numbers, lists and mappings with texts as keys.
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

    `is_retryable`: it was refused for want of room, which comes as prompts end.
    """

    prompt_id: str
    event: str
    step: int | None
    rewards: tuple[float, ...]
    detail: str
    is_retryable: bool = False


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Metrics by verl's names."""

    metrics: Mapping[str, float]


class PolicyClient:
    """Calls the reward service of a run. Close it, or use it as a context manager.

    `sluice.client.AsyncClient` is the client of a whole run, with retries.

    Args:
        address: host:port of the reward service.
        max_message_bytes: largest message either way.
        credentials: what the service is shown; see `sluice.rpc.credentials.client_credentials`.
    """

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = 64 << 20,
        credentials: Credentials = OPEN,
    ) -> None:
        self._address = address
        self._channel = open_channel(
            address, max_message_bytes=max_message_bytes, credentials=credentials
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def submit(self, prompts: Sequence[NewPrompt]) -> AsyncGenerator[PromptEvent, None]:
        """Submits prompts; yields a receipt for each, then an outcome for each accepted one.

        Accepted prompts stay in the run when the caller leaves early.
        """
        stub = reward_stub(self._channel)
        stream = stream_call(
            stub.SubmitPrompts,
            _requests(prompts),
            name="RewardService/SubmitPrompts",
            peer=self._address,
            phase="submitting prompts",
        )
        async with aclosing(stream) as answers:
            async for answer in answers:
                yield prompt_event(answer)

    async def evaluate(
        self,
        policy_version: int,
        *,
        n: int | None,
        temperature: float | None,
        stall_s: float = _STALL_S,
    ) -> ValidationResult:
        """Validates the announced policy. Waits as long as the reward service makes progress.

        Args:
            policy_version: the announced one; another one is refused.
            n: responses per prompt; None: as configured.
            temperature: of sampling; None: as configured.
            stall_s: longest time without any group that is finished, seconds.

        Raises:
            DeadlineError: nothing moved for `stall_s`.
            SluiceError: as the service failed.
        """
        stub, phase = reward_stub(self._channel), f"evaluating version {policy_version}"
        order = reward_pb2.EvaluateRequest(
            policy_version=policy_version, n=n, temperature=temperature
        )
        answer = await while_progressing(
            unary_call(
                stub.Evaluate,
                order,
                name="RewardService/Evaluate",
                peer=self._address,
                phase=phase,
            ),
            self._progress,
            stall_s=stall_s,
            interval_s=min(_LOOK_EVERY_S, stall_s / 4),
            peer=self._address,
            phase=phase,
        )
        return ValidationResult(dict(answer.metrics))

    async def _progress(self) -> object:
        """Something that differs whenever the reward service got on; None if it cannot be asked."""
        try:
            status = await unary_call(
                reward_stub(self._channel).GetStatus,
                reward_pb2.GetStatusRequest(),
                name="RewardService/GetStatus",
                peer=self._address,
                phase="asking for its status",
            )
        except (DeadlineError, PeerError):
            return None
        return dict(status.prompts_by_end), status.groups_kept, dict(status.statistics)


async def _requests(
    prompts: Sequence[NewPrompt],
) -> AsyncIterator[reward_pb2.SubmitPromptsRequest]:
    for prompt in prompts:
        yield prompt_to_proto(prompt)


def prompt_to_proto(prompt: NewPrompt) -> reward_pb2.SubmitPromptsRequest:
    """Encodes a prompt to train on.

    Raises:
        InvalidRequestError: a text of it is no Unicode, its `extra_info` cannot travel, or an image
            is none.
        DataError: the file of an image cannot be read.
    """
    owner = f"prompt {prompt.prompt_id}"
    chat = ChatWithImages(prompt.messages, prompt.images)
    try:
        return reward_pb2.SubmitPromptsRequest(
            prompt_id=prompt.prompt_id,
            messages=chat_prompt_to_proto(prompt.messages).chat.messages,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=extra_info_to_proto(prompt.extra_info, owner),
            images=encoded_images(owner, chat),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{owner}: no text of Unicode: {error}") from error


def extra_info_to_proto(values: Mapping[str, object], owner: str) -> struct_pb2.Struct | None:
    """Encodes further information for a scorer; none for none at all.

    Args:
        owner: whose it is, for errors.

    Raises:
        InvalidRequestError: a value is no text, number, truth value, list or mapping of these.
    """
    if not values:
        return None
    struct = struct_pb2.Struct()
    try:
        struct.update(cast("dict[str, Any]", values))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            f"{owner}: extra_info cannot be sent ({error}); use texts, numbers, lists, mappings"
        ) from error
    return struct


def prompt_event(answer: reward_pb2.SubmitPromptsResponse) -> PromptEvent:
    """Decodes a receipt or an outcome."""
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
