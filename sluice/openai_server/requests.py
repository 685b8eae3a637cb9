"""Requests in the OpenAI dialect: decode them, refuse fields that are not offered, and translate
them into requests of the SDK.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgspec

from sluice.client.generation_types import (
    MAX_SAMPLES,
    ChatWithImages,
    GenerateOptions,
    Prompt,
    Sampling,
)
from sluice.codec.fields import shorten
from sluice.data.image_sources import DATA_URI, image_of_uri
from sluice.errors import InvalidRequestError
from sluice.json_objects import DECODE_ERRORS
from sluice.openai_server.errors import RefusedError
from sluice.types import IMAGE_MARK, ChatMessage, Tool, ToolCall
from sluice.vision.image_header import FORMATS, read_image_header

Kind = Literal["chat", "completion"]

MAX_PROMPTS, MAX_CHOICES = 256, MAX_SAMPLES
_COMPLETION_TOKENS = 16  # the dialect's default for a completion without max_tokens
_SEED_BITS = 63
_TEXT, _IMAGE = "text", "image_url"
# Most templates leave turns of other roles out, and say nothing.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}

_SEND_TOOLS = "send tools"
_SEND_MAX_TOKENS = "send max_tokens"
_ONLY_TEXT = "only text is offered"
_SET_TEMPLATE = "set chat_template_kwargs as the model's template has it"

# Names of fields, neutral values, remedy.
_Row = tuple[str, tuple[object, ...], str]

_OF_BOTH: tuple[_Row, ...] = (
    # how tokens are sampled
    (
        "frequency_penalty presence_penalty min_p min_tokens min_length top_a epsilon_cutoff",
        (0,),
        "",
    ),
    ("eta_cutoff no_repeat_ngram_size mirostat mirostat_mode dry_multiplier", (0,), ""),
    ("xtc_probability dynatemp_range smoothing_factor penalty_alpha top_n_sigma", (0,), ""),
    ("repetition_penalty length_penalty num_beams typical_p tfs tfs_z", (1,), ""),
    ("encoder_repetition_penalty guidance_scale", (1,), ""),
    ("use_beam_search early_stopping", (False,), ""),
    ("do_sample", (True,), "send temperature 0 for the most probable tokens"),
    ("max_new_tokens max_length", (), _SEND_MAX_TOKENS),
    ("logit_bias vllm_xargs custom_params mm_processor_kwargs", ({},), ""),
    ("logits_processors custom_logit_processor", ([],), ""),
    ("allowed_token_ids bad_words bad_words_ids", ([],), ""),
    ("lora_path lora_request", (), ""),
    # the form of an answer
    ("response_format", ({"type": "text"}, {}), _ONLY_TEXT),
    ("guided_json guided_regex guided_choice guided_grammar structured_outputs", (), ""),
    ("structural_tag grammar ebnf regex json_schema json_object stop_regex", (), ""),
    # what an answer reports
    ("include_stop_str_in_output no_stop_trim", (False,), ""),
    ("skip_special_tokens", (True,), ""),
    ("return_tokens_as_token_ids", (False,), "send return_token_ids"),
    ("top_logprobs", (0,), "only the sampled token's logprob is known"),
    ("prompt_logprobs", (), "send echo and logprobs to /v1/completions"),
    ("suffix", ("",), "only continuing is offered"),
    # what the model reads
    ("truncate_prompt_tokens", (), "prompts are never cut; send a shorter one"),
)
_OF_CHAT: tuple[_Row, ...] = (
    ("functions", ([],), _SEND_TOOLS),
    ("function_call", ("none", "auto"), _SEND_TOOLS),
    # Agents send "required" with every request, and know what to do with an answer without a call.
    ("tool_choice", ("auto", "none", "required"), "calls are sampled, never forced"),
    ("parallel_tool_calls", (True,), "an answer may have several calls"),
    ("documents", ([],), "write them into a message"),
    ("chat_template", (), "the model's own renders the messages"),
    ("add_generation_prompt", (True,), ""),
    ("continue_final_message", (False,), "render the text, and send it as a completion"),
    ("reasoning_effort enable_thinking thinking thinking_budget reasoning", (), _SET_TEMPLATE),
    ("include_reasoning", (True,), "thoughts are always in the answer"),
    ("modalities", (["text"],), _ONLY_TEXT),
    ("audio", (), _ONLY_TEXT),
    ("verbosity", ("medium",), "ask for it in a message"),
    ("web_search_options", (), ""),
    ("echo", (False,), "render the text, and send it as a completion"),
)
_OF_COMPLETION: tuple[_Row, ...] = (
    ("prompt_embeds", (), "send the prompt as a text or as token ids"),
    ("chat_template_kwargs", ({},), "ask /v1/chat/completions, which has a template"),
    ("max_completion_tokens", (), _SEND_MAX_TOKENS),
)


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that would change the answer, and that no engine here honours.

    Attributes:
        neutral: values besides null that change nothing; errors name the first.
        remedy: what to do instead.
    """

    neutral: tuple[object, ...] = ()
    remedy: str = ""


def _by_field(*tables: Sequence[_Row]) -> Mapping[str, UnsupportedField]:
    rows = (row for table in tables for row in table)
    return {
        name: UnsupportedField(neutral, remedy)
        for names, neutral, remedy in rows
        for name in names.split()
    }


UNOFFERED: Mapping[Kind, Mapping[str, UnsupportedField]] = MappingProxyType(
    {"chat": _by_field(_OF_BOTH, _OF_CHAT), "completion": _by_field(_OF_BOTH, _OF_COMPLETION)}
)


def check_unsupported_fields(body: bytes, kind: Kind) -> None:
    """Refuse a body, a JSON object, with a field that would change the answer and cannot.

    Raises:
        RefusedError: names the field, its value and the remedy.
    """
    for field, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        unsupported = UNOFFERED[kind].get(field)
        if unsupported is None:
            continue
        value = msgspec.json.decode(raw)
        if value is None or value in unsupported.neutral:
            continue
        remedy = "leave it out"
        if unsupported.neutral:
            remedy = f"send {msgspec.json.encode(unsupported.neutral[0]).decode()}, or {remedy}"
        reason = f" ({unsupported.remedy})" if unsupported.remedy else ""
        raise _refusal(field, f"{shorten(value)} is not offered{reason}; {remedy}")


class _ImageUrl(msgspec.Struct):
    """The place of an image: a ``data:`` URI, since nothing is fetched."""

    url: str


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""
    image_url: _ImageUrl | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class _TurnCall(msgspec.Struct):
    function: _CalledFunction
    id: str = ""


class _ChatTurn(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_TurnCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Function(msgspec.Struct):
    """A function; the schema of its parameters keeps the order of its keys."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class _OfferedTool(msgspec.Struct):
    type: str = "function"
    function: _Function | None = None


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


class ChatRequest(_RequestFields):
    """The body of ``/v1/chat/completions``."""

    messages: list[_ChatTurn] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[_OfferedTool] | None = None
    tool_choice: object = None
    separate_reasoning: bool | None = None


class CompletionRequest(_RequestFields):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]] = ""
    logprobs: int | None = None
    echo: bool | None = None


RequestT = TypeVar("RequestT", bound=_RequestFields)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a server on one request.

    Args:
        deadline_s: longest time, seconds; None: as long as it takes.
        max_priority: highest priority.
        max_choices: most choices that the server ever samples at once.
        choices_option: the server's option for that.
        max_tokens: longest response; None: the replica decides.
    """

    deadline_s: float | None = None
    max_priority: int = 0
    max_choices: int = MAX_CHOICES
    choices_option: str = "--max-choices"
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request for the SDK. Choice *i* of prompt *p* is sample ``p n + i`` of the request.

    Attributes:
        echo: the answer has the prompts.
        prompt_only: it has nothing that was sampled.
    """

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    options: GenerateOptions
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    echo: bool = False
    prompt_only: bool = False

    @property
    def num_choices(self) -> int:
        """Return the choices of all prompts."""
        return len(self.prompts) * self.options.n

    @property
    def reads_answer(self) -> bool:
        """Return whether thoughts and calls are apart from the text, once a sample has ended."""
        return bool(self.options.tools or self.options.tool_format)

    @property
    def every_token(self) -> bool:
        """Return whether tokens are needed as they come: each one's text is known only then."""
        return self.logprobs or (self.stream and not self.reads_answer)


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """Decode a body.

    Raises:
        RefusedError: it is no JSON, a field has another type, or a field that is not offered would
            change the answer; names the field.
    """
    try:
        body.decode()  # parts of it are decoded later
        request = msgspec.json.decode(body, type=kind)
        check_unsupported_fields(body, "chat" if issubclass(kind, ChatRequest) else "completion")
    except DECODE_ERRORS as error:
        _, _, path = str(error).partition("at `$")
        raise RefusedError(f"body: {error}", path.strip(".`")) from error
    return request


def parse_chat(request: ChatRequest, bounds: Bounds) -> ParsedRequest:
    """Translate a chat request. Raise RefusedError, which names the field."""
    if not request.messages:
        raise _refusal("messages", "empty; send at least one turn")
    return _make_request(
        request,
        "chat",
        (_conversation(request.messages),),
        # 0 means as long as the context allows.
        _max_tokens(request, "max_completion_tokens", bounds)
        or _max_tokens(request, "max_tokens", bounds)
        or 0,
        bounds,
        logprobs=bool(request.logprobs),
    )


def parse_completion(request: CompletionRequest, bounds: Bounds) -> ParsedRequest:
    """Translate a completion request. Raise RefusedError, which names the field."""
    if (request.logprobs or 0) > 1:
        detail = (
            f"{request.logprobs}; only the sampled token's and, of an echoed prompt, the most "
            "probable one's are known: send 0 or 1"
        )
        raise _refusal("logprobs", detail)
    echo = bool(request.echo)
    if echo and request.stream:
        raise _refusal("echo", "true with stream, which sends only what is sampled; leave one out")
    prompt_only = echo and request.max_tokens == 0
    sampled = 1 if prompt_only else _max_tokens(request, "max_tokens", bounds)
    parsed = _make_request(
        request,
        "completion",
        _prompts(request.prompt),
        sampled or _COMPLETION_TOKENS,
        bounds,
        logprobs=request.logprobs is not None,
    )
    # The text of a prompt of tokens comes with their logprobs.
    needs_prompt = echo and (
        parsed.logprobs or not all(isinstance(prompt, str) for prompt in parsed.prompts)
    )
    options = replace(parsed.options, prompt_logprobs=needs_prompt)
    return replace(parsed, options=options, echo=echo, prompt_only=prompt_only)


def _make_request(
    request: _RequestFields,
    kind: Kind,
    prompts: tuple[Prompt, ...],
    max_tokens: int,
    bounds: Bounds,
    *,
    logprobs: bool,
) -> ParsedRequest:
    _check_values(request, len(prompts), bounds)
    try:
        options = _options(request, len(prompts), max_tokens, bounds)
    except InvalidRequestError as error:
        field, _, _ = str(error).partition(":")
        raise RefusedError(str(error), field.partition("[")[0]) from error
    return ParsedRequest(
        kind=kind,
        model=request.model,
        prompts=prompts,
        options=options,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
    )


def _check_values(request: _RequestFields, num_prompts: int, bounds: Bounds) -> None:
    """Refuse the values that the SDK does not check."""
    n = 1 if request.n is None else request.n
    choices = f"{n} for {num_prompts} prompts"
    budget, priority, seed = request.token_budget, request.priority, request.seed
    if (request.best_of or request.n or 1) != (request.n or 1):
        raise _refusal(
            "best_of", f"{request.best_of}, and n is {n}; send the same as n, or leave it out"
        )
    if not 1 <= n <= MAX_SAMPLES:
        raise _refusal("n", f"{n} is not in 1..{MAX_SAMPLES}")
    if n * num_prompts > MAX_CHOICES:
        raise _refusal("n", f"{choices}; at most {MAX_CHOICES} choices are sampled at once")
    if n * num_prompts > bounds.max_choices:
        raise _refusal(
            "n",
            f"{choices}; this server samples at most {bounds.max_choices} choices at once "
            f"({bounds.choices_option}): send several requests",
        )
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise _refusal("seed", f"{seed} is not a 64-bit integer")
    if priority is not None and priority > bounds.max_priority:
        raise _refusal(
            "priority",
            f"{priority}; at most {bounds.max_priority} is taken: send that, or have the server "
            "started with a higher --max-priority",
        )
    if budget and budget < n * num_prompts:
        raise _refusal(
            "token_budget",
            f"{budget} for {n * num_prompts} choices; give at least one token a choice, or 0 for "
            "no bound",
        )


def _options(
    request: _RequestFields, num_prompts: int, max_tokens: int, bounds: Bounds
) -> GenerateOptions:
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed % (1 << 64)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    priority = min(0, bounds.max_priority) if request.priority is None else request.priority
    deadlines = [
        deadline for deadline in (request.deadline_s, bounds.deadline_s) if deadline is not None
    ]
    chat = request if isinstance(request, ChatRequest) else None
    tools = _tools(chat) if chat else ()
    return GenerateOptions(
        n=1 if request.n is None else request.n,
        sampling=Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or -1,  # other servers' 0 is off, as our -1
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            # Some programs send an empty text for none.
            stop=tuple(stop_text for stop_text in stops if stop_text),
        ),
        priority=priority,
        deadline_s=min(deadlines, default=None),
        token_budget=(request.token_budget or 0) // num_prompts,
        add_special_tokens=request.add_special_tokens,
        chat_template_kwargs=(chat.chat_template_kwargs if chat else None) or {},
        tools=tools,
        # With tools the run's format decides.
        tool_format="plain" if chat and chat.separate_reasoning and not tools else "",
    )


def _tools(request: ChatRequest) -> tuple[Tool, ...]:
    """Return the tools that the policy may call."""
    tools: list[Tool] = []
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function" or tool.function is None:
            raise _refusal("tools", f"[{index}] is of type {shorten(tool.type)}; send functions")
        schema = bytes(tool.function.parameters).decode()
        parameters = "" if schema == "null" else schema
        tools.append(Tool(tool.function.name, tool.function.description or "", parameters))
    return () if request.tool_choice == "none" else tuple(tools)


def _max_tokens(request: _RequestFields, field: str, bounds: Bounds) -> int | None:
    max_tokens: int | None = getattr(request, field)
    # Our own 0, as long as the context allows, is an error in the dialect.
    if max_tokens is not None and max_tokens < 1:
        unless = ", unless echo is true" if isinstance(request, CompletionRequest) else ""
        raise _refusal(field, f"{max_tokens}; at least one token is sampled{unless}")
    if max_tokens is not None and bounds.max_tokens is not None and max_tokens > bounds.max_tokens:
        raise _refusal(
            field,
            f"{max_tokens}; prompt and response have {bounds.max_tokens + 1} tokens in this run: "
            f"send at most {bounds.max_tokens}, less the prompt's tokens",
        )
    return max_tokens


def _prompts(prompt: str | Sequence[str | int | Sequence[int]]) -> tuple[Prompt, ...]:
    """Return one text or list of token ids, or several of one kind."""
    if isinstance(prompt, str):
        return (prompt,)
    numbers = tuple(item for item in prompt if isinstance(item, int))
    if numbers and len(numbers) == len(prompt):
        return (numbers,)
    texts = tuple(item for item in prompt if isinstance(item, str))
    lists = tuple(tuple(item) for item in prompt if not isinstance(item, int | str))
    prompts: tuple[Prompt, ...] = texts or lists
    if len(prompts) != len(prompt) or not 1 <= len(prompts) <= MAX_PROMPTS:
        raise _refusal(
            "prompt", f"send one text or list of token ids, or 1 to {MAX_PROMPTS} of a kind"
        )
    return prompts


def _conversation(turns: Sequence[_ChatTurn]) -> Prompt:
    """Return turns for the SDK, with ``<image>`` in a text where an image was."""
    images: list[bytes] = []
    messages = tuple(_message(turn, index, images) for index, turn in enumerate(turns))
    if not images:
        return messages
    if sum(message.content.count(IMAGE_MARK) for message in messages) != len(images):
        raise _refusal(
            "messages",
            f"a text holds {IMAGE_MARK}, which stands for an image here; leave it out of requests "
            "with images",
        )
    return ChatWithImages(messages, tuple(images))


def _message(turn: _ChatTurn, index: int, images: list[bytes]) -> ChatMessage:
    if turn.role not in _ROLES:
        raise _refusal(
            f"messages[{index}].role", f"{shorten(turn.role)}; send {', '.join(sorted(_ROLES))}"
        )
    calls = tuple(
        ToolCall(call.function.name, call.function.arguments or "{}", call.id)
        for call in turn.tool_calls or ()
    )
    return ChatMessage(
        _ROLES[turn.role],
        _text(turn, index, images),
        calls,
        turn.tool_call_id or "",
        turn.reasoning_content or "",
    )


def _text(turn: _ChatTurn, index: int, images: list[bytes]) -> str:
    if turn.content is None or isinstance(turn.content, str):
        return turn.content or ""
    field = f"messages[{index}].content"
    texts: list[str] = []
    for number, part in enumerate(turn.content):
        if part.type == _IMAGE:
            images.append(_image(part, f"{field}[{number}]"))
            texts.append(IMAGE_MARK)
        elif part.type == _TEXT:
            texts.append(part.text)
        else:
            raise _refusal(field, f"{shorten(part.type)} is not offered; send text or image_url")
    return "".join(texts)


def _image(part: _ContentPart, field: str) -> bytes:
    url = "" if part.image_url is None else part.image_url.url
    name = f"{field}.image_url"
    if not url.startswith(DATA_URI):
        raise RefusedError(
            f"{name}: {shorten(url)} is not fetched; send {FORMATS} as data:image/...;base64,...",
            field,
        )
    try:
        data = image_of_uri(url)
        read_image_header(name, data)
    except ValueError as error:
        raise RefusedError(f"{name}: {error}", field) from error
    except InvalidRequestError as error:
        raise RefusedError(str(error), field) from error
    return data


def _refusal(field: str, detail: str) -> RefusedError:
    return RefusedError(f"{field}: {detail}", field)
