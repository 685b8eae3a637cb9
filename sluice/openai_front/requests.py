"""Requests in the OpenAI dialect: decode them, refuse fields that are not offered, translate
them into our terms.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from sluice.client.generation_types import (
    MAX_SAMPLES,
    ChatWithImages,
    GenerateOptions,
    Prompt,
    Sampling,
)
from sluice.codec.fields import shortened
from sluice.data.image_sources import DATA_URI, image_of_uri
from sluice.errors import InvalidRequestError
from sluice.openai_front.errors import RefusedError
from sluice.types import IMAGE_MARK, ChatMessage
from sluice.vision.image_header import FORMATS, read_image_header

Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class _Unoffered:
    """`neutral`: values beside null that say nothing, the one to name first. `remedy`: instead."""

    neutral: tuple[object, ...] = ()
    remedy: str = ""


_FALSE, _TRUE = _Unoffered((False,)), _Unoffered((True,))
_ZERO, _ONE = _Unoffered((0,)), _Unoffered((1,))
_NOTHING, _EMPTY_LIST, _EMPTY_OBJECT = _Unoffered(), _Unoffered(([],)), _Unoffered(({},))
_TEMPLATE = "set chat_template_kwargs as the model's template has it"
_THINKING = _Unoffered(remedy=_TEMPLATE)
_OF_PROMPTS = "logprobs of prompts are not known"
_TOOLS = _Unoffered(([],), "functions are not called; describe them in a message")
_TOOL_CHOICE = _Unoffered(("none", "auto"), "functions are not called")

_OF_BOTH = {
    # how tokens are drawn
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), _ZERO),
    **dict.fromkeys(("min_tokens", "min_length"), _ZERO),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "num_beams", "typical_p"), _ONE),
    **dict.fromkeys(("tfs", "tfs_z", "encoder_repetition_penalty", "guidance_scale"), _ONE),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), _ZERO),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability"), _ZERO),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "penalty_alpha", "top_n_sigma"), _ZERO),
    **dict.fromkeys(("use_beam_search", "early_stopping"), _FALSE),
    "do_sample": _Unoffered((True,), "send temperature 0 for the most probable tokens"),
    "max_new_tokens": _Unoffered(remedy="send max_tokens"),
    "max_length": _Unoffered(remedy="send max_tokens"),
    "logit_bias": _EMPTY_OBJECT,
    "vllm_xargs": _EMPTY_OBJECT,
    "custom_params": _EMPTY_OBJECT,
    **dict.fromkeys(("logits_processors", "custom_logit_processor"), _EMPTY_LIST),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "bad_words_ids"), _EMPTY_LIST),
    **dict.fromkeys(("lora_path", "lora_request"), _NOTHING),
    # what an answer may look like
    "response_format": _Unoffered(({"type": "text"}, {}), "only text is offered"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _NOTHING),
    **dict.fromkeys(("structured_outputs", "structural_tag", "grammar", "ebnf", "regex"), _NOTHING),
    **dict.fromkeys(("json_schema", "json_object", "stop_regex"), _NOTHING),
    # what of it is told, and how
    "include_stop_str_in_output": _FALSE,
    "no_stop_trim": _FALSE,
    "skip_special_tokens": _TRUE,
    "return_tokens_as_token_ids": _Unoffered((False,), "send return_token_ids"),
    "top_logprobs": _Unoffered((0,), "only the drawn token's logprob is known"),
    "echo": _Unoffered((False,), _OF_PROMPTS),
    "prompt_logprobs": _Unoffered(remedy=_OF_PROMPTS),
    "suffix": _Unoffered(("",), "only continuing is offered"),
    # what the model reads
    "truncate_prompt_tokens": _Unoffered(remedy="prompts are never cut; send a shorter one"),
    "mm_processor_kwargs": _EMPTY_OBJECT,
}
_OF_CHAT = {
    "tools": _TOOLS,
    "functions": _TOOLS,
    "tool_choice": _TOOL_CHOICE,
    "function_call": _TOOL_CHOICE,
    "documents": _Unoffered(([],), "write them into a message"),
    "chat_template": _Unoffered(remedy="the model's own renders the messages"),
    "add_generation_prompt": _TRUE,
    "continue_final_message": _Unoffered((False,), "render the text, and send it as a completion"),
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "thinking"), _THINKING),
    **dict.fromkeys(("thinking_budget", "reasoning"), _THINKING),
    "include_reasoning": _Unoffered((True,), "an answer is told whole, with what was thought"),
    "separate_reasoning": _Unoffered((False,), "an answer is told whole, with what was thought"),
    "modalities": _Unoffered((["text"],), "only text is offered"),
    "audio": _Unoffered(remedy="only text is offered"),
    "verbosity": _Unoffered(("medium",), "ask for it in a message"),
    "web_search_options": _NOTHING,
}
_OF_COMPLETION = {
    "prompt_embeds": _Unoffered(remedy="send the prompt as a text or as token ids"),
    "chat_template_kwargs": _Unoffered(({},), "ask /v1/chat/completions, which has a template"),
    "max_completion_tokens": _Unoffered(remedy="send max_tokens"),
}

UNOFFERED: Mapping[Kind, Mapping[str, _Unoffered]] = MappingProxyType(
    {"chat": {**_OF_BOTH, **_OF_CHAT}, "completion": {**_OF_BOTH, **_OF_COMPLETION}}
)


def check_unoffered(body: bytes, kind: Kind) -> None:
    """Refuses a body with a field that would change the answer, and cannot.

    Args:
        body: a JSON object.

    Raises:
        RefusedError: names the field, its value and the remedy.
    """
    for field, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        known = UNOFFERED[kind].get(field)
        if known is None:
            continue
        value = msgspec.json.decode(raw)
        if value is not None and value not in known.neutral:
            raise RefusedError(_refusal(field, value, known), field)


def _refusal(field: str, value: object, known: _Unoffered) -> str:
    remedy = "leave it out"
    if known.neutral:
        remedy = f"send {msgspec.json.encode(known.neutral[0]).decode()}, or {remedy}"
    reason = f" ({known.remedy})" if known.remedy else ""
    return f"{field}: {shortened(value)} is not offered{reason}; {remedy}"


_TEXT, _IMAGE = "text", "image_url"


class ImageUrl(msgspec.Struct):
    """Where an image is: a ``data:`` URI, since nothing is fetched."""

    url: str


class ContentPart(Protocol):
    """A piece of a turn."""

    type: str
    text: str
    image_url: ImageUrl | None


class ChatTurn(Protocol):
    """A turn as it was sent."""

    @property
    def role(self) -> str:
        """Whose it is."""
        ...

    @property
    def content(self) -> str | Sequence[ContentPart] | None:
        """A text, or pieces of it with images in between."""
        ...


def conversation(turns: Sequence[ChatTurn]) -> Prompt:
    """Turns in our terms: ``<image>`` stands in a text where an image was.

    Raises:
        RefusedError: a part is of another kind, or an image cannot be used; names the field.
    """
    images: list[bytes] = []
    messages = tuple(_message(turn, index, images) for index, turn in enumerate(turns))
    if not images:
        return messages
    if sum(message.content.count(IMAGE_MARK) for message in messages) != len(images):
        raise RefusedError(
            f"messages: a text holds {IMAGE_MARK}, which stands for an image here; leave it out of "
            "requests with images",
            "messages",
        )
    return ChatWithImages(messages, tuple(images))


def _message(turn: ChatTurn, index: int, images: list[bytes]) -> ChatMessage:
    content = turn.content
    if content is None or isinstance(content, str):
        return ChatMessage(turn.role, content or "")
    place = f"messages[{index}].content"
    texts: list[str] = []
    for number, part in enumerate(content):
        if part.type == _IMAGE:
            images.append(_image(part, f"{place}[{number}]"))
            texts.append(IMAGE_MARK)
        elif part.type == _TEXT:
            texts.append(part.text)
        else:
            raise RefusedError(
                f"{place}: {shortened(part.type)} is not offered; send text or image_url", place
            )
    return ChatMessage(turn.role, "".join(texts))


def _image(part: ContentPart, place: str) -> bytes:
    url = "" if part.image_url is None else part.image_url.url
    if not url.startswith(DATA_URI):
        raise RefusedError(
            f"{place}.image_url: {shortened(url)} is not fetched; send {FORMATS} as "
            "data:image/...;base64,...",
            place,
        )
    try:
        data = image_of_uri(url)
        read_image_header(f"{place}.image_url", data)
    except ValueError as error:
        raise RefusedError(f"{place}.image_url: {error}", place) from error
    except InvalidRequestError as error:
        raise RefusedError(str(error), place) from error
    return data


MAX_PROMPTS, MAX_CHOICES = 256, MAX_SAMPLES
_COMPLETION_TOKENS = 16  # what the dialect gives a completion that names no max_tokens
_SEED_BITS = 63


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _RequestFields(msgspec.Struct):
    """Fields of both kinds."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    priority: int | None = None
    token_budget: int | None = None
    deadline_s: float | None = None
    return_token_ids: bool | None = None


class _PartFields(msgspec.Struct):
    type: str
    text: str = ""
    image_url: ImageUrl | None = None


class _TurnFields(msgspec.Struct):
    role: str
    content: str | list[_PartFields] | None = None


class ChatRequest(_RequestFields):
    """The body of ``/v1/chat/completions``."""

    messages: list[_TurnFields] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_RequestFields):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]] = ""
    logprobs: int | None = None


RequestT = TypeVar("RequestT", bound=_RequestFields)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a server lets one request ask for.

    Args:
        deadline_s: longest time, seconds; none: as long as it takes.
        max_priority: highest priority.
        max_choices: most choices that it ever draws at once.
        choices_option: its option that says so.
    """

    deadline_s: float | None = None
    max_priority: int = 0
    max_choices: int = MAX_CHOICES
    choices_option: str = "--max-choices"


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request in our terms. Choice *i* of prompt *p* is sample ``p n + i`` of the request."""

    kind: Literal["chat", "completion"]
    model: str
    prompts: tuple[Prompt, ...]
    options: GenerateOptions
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.options.n


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decodes a body.

    Raises:
        RefusedError: it is no JSON, a field has another type, or one is not offered and would
            change the answer; names the field.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
        check_unoffered(body, "chat" if issubclass(kind, ChatRequest) else "completion")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _, _, path = str(error).partition("at `$")
        raise RefusedError(f"body: {error}", path.strip(".`")) from error
    return request


def parse_chat(request: ChatRequest, bounds: Bounds) -> ParsedRequest:
    """Checks a chat request. Raises RefusedError, which names the field."""
    if not request.messages:
        raise RefusedError("messages: empty; send at least one turn", "messages")
    turns = conversation(request.messages)
    longest = _longest("max_completion_tokens", request.max_completion_tokens)
    longest = _longest("max_tokens", request.max_tokens) if longest is None else longest
    return _parsed(request, "chat", (turns,), longest or 0, bounds, logprobs=bool(request.logprobs))


def parse_completion(request: CompletionRequest, bounds: Bounds) -> ParsedRequest:
    """Checks a completion request. Raises RefusedError, which names the field."""
    if (request.logprobs or 0) > 1:
        raise RefusedError(
            f"logprobs: {request.logprobs}; only the drawn token's is known: send 0 or 1",
            "logprobs",
        )
    prompts = _prompts(request.prompt)
    longest = _longest("max_tokens", request.max_tokens) or _COMPLETION_TOKENS
    logprobs = request.logprobs is not None
    return _parsed(request, "completion", prompts, longest, bounds, logprobs=logprobs)


def _parsed(
    request: _RequestFields,
    kind: Literal["chat", "completion"],
    prompts: tuple[Prompt, ...],
    max_tokens: int,
    bounds: Bounds,
    *,
    logprobs: bool,
) -> ParsedRequest:
    if (request.best_of or request.n or 1) != (request.n or 1):
        raise RefusedError(
            f"best_of: {request.best_of}, and n is {request.n or 1}; send the same as n, or "
            "leave it out",
            "best_of",
        )
    options = _options(request, len(prompts), max_tokens, bounds)
    with_usage = request.stream_options is not None and request.stream_options.include_usage
    return ParsedRequest(
        kind=kind,
        model=request.model,
        prompts=prompts,
        options=options,
        stream=bool(request.stream),
        include_usage=with_usage,
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
    )


def _options(
    request: _RequestFields, num_prompts: int, max_tokens: int, bounds: Bounds
) -> GenerateOptions:
    n = _samples(request.n, num_prompts, bounds)
    try:
        return GenerateOptions(
            n=n,
            sampling=Sampling(
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                top_k=request.top_k or -1,  # other servers' 0 is off, as our -1
                max_tokens=max_tokens,
                seed=secrets.randbits(_SEED_BITS) if request.seed is None else _seed(request.seed),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                ignore_eos=bool(request.ignore_eos),
                stop=_stops(request.stop),
            ),
            priority=_priority(request.priority, bounds.max_priority),
            deadline_s=_earlier(request.deadline_s, bounds.deadline_s),
            token_budget=_budget(request.token_budget, n * num_prompts) // num_prompts,
            add_special_tokens=request.add_special_tokens,
            chat_template_kwargs=_template_kwargs(request),
        )
    except RefusedError:
        raise
    except InvalidRequestError as error:
        field, _, _ = str(error).partition(":")
        raise RefusedError(str(error), field.partition("[")[0]) from error


def _samples(given: int | None, num_prompts: int, bounds: Bounds) -> int:
    """Samples of each prompt."""
    n = 1 if given is None else given
    if not 1 <= n <= MAX_SAMPLES:
        raise RefusedError(f"n: {n} is not in 1..{MAX_SAMPLES}", "n")
    asked = f"n: {n} for {num_prompts} prompts"
    if n * num_prompts > MAX_CHOICES:
        raise RefusedError(f"{asked}; at most {MAX_CHOICES} choices are drawn at once", "n")
    if n * num_prompts > bounds.max_choices:
        raise RefusedError(
            f"{asked}; this server draws at most {bounds.max_choices} choices at once "
            f"({bounds.choices_option}): send several requests",
            "n",
        )
    return n


def _priority(given: int | None, most: int) -> int:
    if given is not None and given > most:
        raise RefusedError(
            f"priority: {given}; at most {most} is taken: send that, or have the server started "
            "with a higher --max-priority",
            "priority",
        )
    return min(0, most) if given is None else given


def _earlier(asked_s: float | None, served_s: float | None) -> float | None:
    """The deadline that passes first."""
    given = [each for each in (asked_s, served_s) if each is not None]
    return min(given, default=None)


def _budget(given: int | None, num_choices: int) -> int:
    """Most tokens of all choices together; 0: no bound."""
    if given and given < num_choices:
        raise RefusedError(
            f"token_budget: {given} for {num_choices} choices; give at least one token a choice, "
            "or 0 for no bound",
            "token_budget",
        )
    return given or 0


def _longest(field: str, given: int | None) -> int | None:
    """The field's value. Our own 0, as long as the context allows, is an error in the dialect."""
    if given is not None and given < 1:
        raise RefusedError(f"{field}: {given}; at least one token is drawn", field)
    return given


def _template_kwargs(request: _RequestFields) -> dict[str, Any]:
    """A completion has no template."""
    given = request.chat_template_kwargs if isinstance(request, ChatRequest) else None
    return given or {}


def _seed(seed: int) -> int:
    if not -(1 << 63) <= seed < 1 << 63:
        raise RefusedError(f"seed: {seed} is no integer of 64 bits", "seed")
    return seed % (1 << 64)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """An empty text, which some programs send for none, ends nothing."""
    return tuple(each for each in ([stop] if isinstance(stop, str) else stop or ()) if each)


def _prompts(prompt: str | Sequence[str | int | Sequence[int]]) -> tuple[Prompt, ...]:
    """One text or list of token ids, or several; not a mixture."""
    if isinstance(prompt, str):
        return (prompt,)
    numbers = tuple(item for item in prompt if isinstance(item, int))
    if numbers and len(numbers) == len(prompt):
        return (numbers,)
    texts = tuple(item for item in prompt if isinstance(item, str))
    lists = tuple(tuple(item) for item in prompt if not isinstance(item, int | str))
    found: tuple[Prompt, ...] = texts or lists
    if len(found) != len(prompt) or not 1 <= len(found) <= MAX_PROMPTS:
        raise RefusedError(
            f"prompt: send one text or list of token ids, or 1 to {MAX_PROMPTS} of a kind", "prompt"
        )
    return found
