"""What a request in the OpenAI dialect asks for: decoded, checked, in our own terms."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from sluice.client.generation_types import MAX_SAMPLES, GenerateOptions, Prompt, Sampling
from sluice.errors import InvalidRequestError
from sluice.openai_front.asked_images import ImageUrl, conversation
from sluice.openai_front.refusals import RefusedError
from sluice.openai_front.unoffered_fields import check_unoffered

MAX_PROMPTS, MAX_CHOICES = 256, MAX_SAMPLES
_COMPLETION_TOKENS = 16  # what the dialect gives a completion that names no max_tokens
_SEED_BITS = 63


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Request(msgspec.Struct):
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


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    image_url: ImageUrl | None = None


class _Turn(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class ChatRequest(_Request):
    """The body of ``/v1/chat/completions``."""

    messages: list[_Turn] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Request):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]] = ""
    logprobs: int | None = None


RequestT = TypeVar("RequestT", bound=_Request)


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
    return _asked(request, "chat", (turns,), longest or 0, bounds, logprobs=bool(request.logprobs))


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
    return _asked(request, "completion", prompts, longest, bounds, logprobs=logprobs)


def _asked(
    request: _Request,
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
    request: _Request, num_prompts: int, max_tokens: int, bounds: Bounds
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


def _template_kwargs(request: _Request) -> dict[str, Any]:
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
