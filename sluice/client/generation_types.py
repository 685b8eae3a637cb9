"""Requests to generate, with or without images, and the events of their progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sluice.codec.bounds import MAX_PRIORITY, MAX_SAMPLE_INDEX
from sluice.codec.fields import check_range, valid_unicode
from sluice.codec.rollout import check_sampling, check_stops
from sluice.codec.tools import check_tool_format, check_tools, tools_to_proto
from sluice.data.image_sources import read_image
from sluice.errors import InvalidRequestError
from sluice.telemetry.tracing import parse_traceparent
from sluice.types import ChatMessage, Logprobs, Rollout, ScoredPrompt, TokenIds, Tool
from sluice.vision.image_header import read_image_header
from sluice.vision.image_limits import check_marks

Image = bytes | str | Path
"""An encoded file (PNG, JPEG or WebP), or the path of one."""

_LARGEST_FILE_BYTES = 1 << 30
"""More than any service accepts; it keeps a wrong path from filling the memory."""

MAX_SAMPLES = MAX_SAMPLE_INDEX + 1
_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ChatWithImages:
    """Turns for the chat template, with one image for each ``<image>`` in them, in order.

    The run limits the images (`sluice.limits`), and names the setting when it refuses one.
    """

    messages: Sequence[ChatMessage]
    images: Sequence[Image]


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """A conversation's exact tokens, and the turns that follow them.

    The prompt begins with exactly these tokens, and only the turns are rendered. A replica refuses
    it with HistoryRewrittenError if the chat template writes earlier turns differently in history;
    then send the whole conversation.

    Args:
        token_ids: [tokens] of the prompt as `GenerationStarted` has it, then of the response.
        messages: new turns of the roles ``user`` and ``tool``; none: the prompt is the tokens.
    """

    token_ids: Sequence[int] | TokenIds
    messages: Sequence[ChatMessage] = ()


def encode_images(owner: str, chat: ChatWithImages) -> list[bytes]:
    """Return the images as they are sent. Paths are relative to the current folder.

    Raises:
        InvalidRequestError: the numbers of images and marks differ, or one is no whole image.
        DataError: a file cannot be read.
    """
    field = f"{owner}: images"
    check_marks(field, len(chat.images), (turn.content for turn in chat.messages))
    return [_encode_image(f"{field}[{index}]", image) for index, image in enumerate(chat.images)]


def _encode_image(field: str, image: Image) -> bytes:
    source = str(image) if isinstance(image, Path) else image
    data = read_image(field, source, Path(), _LARGEST_FILE_BYTES)
    read_image_header(field, data)
    return data


Prompt = str | Sequence[ChatMessage] | Sequence[int] | TokenIds | ChatWithImages | Continuation
"""A text to continue, a conversation (with or without images), token ids, or these and turns."""


def check_traceparent(value: str) -> None:
    """Raise InvalidRequestError unless a value is empty or a W3C header `traceparent`."""
    if value and parse_traceparent(value) is None:
        raise InvalidRequestError(
            f"traceparent: {value!r:.100} is not a W3C trace context; give one such as "
            f"00-{'1' * 32}-{'1' * 16}-01, or leave it empty"
        )


def check_deadline(value: float | None) -> None:
    """Raise InvalidRequestError unless a deadline is None or a number of seconds above 0."""
    if value is not None and not 0 < value < math.inf:
        raise InvalidRequestError(
            f"deadline_s: {value} is not a finite number above 0; None is no deadline"
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled.

    Args:
        temperature: divides the logits, in [0, 100]; 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: highest-probability tokens kept; -1 is off.
        max_tokens: longest response; 0: the rest of the model's context.
        seed: fixes the samples as long as the weights are the same; None: a random one.
        stop_token_ids: further tokens that end a response.
        ignore_eos: the model's own end tokens do not end it.
        stop: texts that end a response with the token that completes one, at most 16 of 1 to 128
            bytes of UTF-8. `Rollout.text` ends before the first; its tokens are complete.

    Raises:
        InvalidRequestError: a value is out of its range; names it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_p, self.top_k)
        check_range("max_tokens", self.max_tokens, 0, _UINT32)
        if self.seed is not None:
            check_range("seed", self.seed, 0, _UINT64)
        for token_id in self.stop_token_ids:
            check_range("stop_token_ids", token_id, 0, _UINT32)
        _check_stop(self.stop)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What to generate, and how the run treats the request.

    Args:
        n: samples.
        sampling: how tokens are sampled.
        priority: requests of higher priority get slots first, -100 to 100; training has 0.
        deadline_s: seconds in all, with every retry; None: as long as it takes.
        token_budget: most response tokens of all samples together, split evenly; 0: no bound.
        first_sample: index of the first sample. A sample's randomness depends on its index.
        request_id: for logs, at most 128 bytes.
        traceparent: the caller's span, as W3C's header of that name writes it. The run records its
            spans of this request below it. Empty: none.
        add_special_tokens: whether the tokenizer adds its special tokens to a text, such as a BOS;
            None: yes for a text, no for a conversation, whose template writes them. Without effect
            on token ids.
        chat_template_kwargs: further arguments of the chat template, such as ``enable_thinking``.
            Each replaces the same one of the run's configuration. For conversations only.
        tools: the policy may call them. Samples then have an `answer`. For conversations only.
        tool_format: how the policy writes calls, one of `TOOL_FORMATS`. Samples then have an
            `answer`. Empty: with tools, the run's format; without, none is read.
        prompt_logprobs: a `ScoredPrompt` comes before the samples finish. For prompts without
            images.

    Raises:
        InvalidRequestError: a value is out of its range; names it.
    """

    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    deadline_s: float | None = None
    token_budget: int = 0
    first_sample: int = 0
    request_id: str = ""
    traceparent: str = ""
    add_special_tokens: bool | None = None
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    tool_format: str = ""
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        check_traceparent(self.traceparent)
        with valid_unicode("tools"):
            check_tools("tools", tools_to_proto(self.tools))
        check_tool_format(self.tool_format)
        if self.n < 1 or self.first_sample < 0 or self.first_sample + self.n > MAX_SAMPLES:
            raise InvalidRequestError(
                f"n: {self.n} samples from {self.first_sample} on; indexes are in "
                f"0..{MAX_SAMPLES - 1}, and n is at least 1"
            )
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_range("token_budget", self.token_budget, 0, _UINT32)
        if self.token_budget and self.token_budget < self.n:
            raise InvalidRequestError(
                f"token_budget: {self.token_budget} for {self.n} samples; give at least one token "
                "a sample, or 0 for no bound"
            )
        check_deadline(self.deadline_s)


@dataclass(frozen=True, slots=True, eq=False)
class GenerationStarted:
    """A replica accepted the prompt, the first replica or one that continues its samples.

    Attributes:
        prompt_token_ids: the prompt as the model reads it.
        version: the policy version that starts.
        replica: its address.
        moved_because: the failure of the replica before; empty for the first.
    """

    prompt_token_ids: TokenIds
    version: int
    replica: str
    moved_because: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SampleDelta:
    """New tokens of one sample, all of one policy version, and the text that they complete."""

    sample_index: int
    token_ids: TokenIds  # [new tokens]
    behavior_logprobs: Logprobs  # [new tokens], natural log
    version: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class SampleFinished:
    """A complete sample."""

    rollout: Rollout


GenerationEvent = GenerationStarted | ScoredPrompt | SampleDelta | SampleFinished


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """All samples of one prompt, in order of their indexes."""

    prompt_token_ids: TokenIds
    rollouts: tuple[Rollout, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the responses."""
        return tuple(rollout.text for rollout in self.rollouts)


def _check_stop(stops: Sequence[str]) -> None:
    if isinstance(stops, str):  # or each of its characters would be a stop text
        raise InvalidRequestError("stop: a single text; give a tuple of texts")
    with valid_unicode("stop"):
        check_stops("stop", stops)


def is_conversation(prompt: Prompt) -> bool:
    """Return whether a prompt consists of turns.

    Raises:
        InvalidRequestError: it is empty, or neither text, turns nor token ids.
    """
    if isinstance(prompt, ChatWithImages | Continuation):
        return True
    if isinstance(prompt, str | np.ndarray):
        return False
    kinds = {isinstance(item, ChatMessage) for item in prompt}
    if len(kinds) != 1:
        raise InvalidRequestError(
            "prompt: send a text, one or more ChatMessage, or one or more token ids"
        )
    return kinds.pop()
