"""The HTTP server: routes, keys, quotas and streams. Only this file imports aiohttp here."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import GenerationEvent, GenerationStarted, SampleDelta
from sluice.codec.fields import shorten
from sluice.concurrency.waits import deadline
from sluice.errors import DeadlineError, PeerError, SluiceError, leaves
from sluice.openai_server.answers import AnswerBuilder, Sink, generate_choices
from sluice.openai_server.errors import (
    CROSS_SITE,
    DEFECT,
    NO_KEY,
    ErrorAnswer,
    RefusedError,
    error_answer,
)
from sluice.openai_server.requests import (
    MAX_CHOICES,
    Bounds,
    ChatRequest,
    CompletionRequest,
    ParsedRequest,
    decode,
    parse_chat,
    parse_completion,
)
from sluice.openai_server.sessions import Sessions
from sluice.rpc.auth import ClientQuota
from sluice.rpc.metadata import AUTHORIZATION, TRACEPARENT, presented_token
from sluice.security.token_file import TokenSource, role_of
from sluice.telemetry.tracing import parse_traceparent
from sluice.types import ScoredPrompt
from sluice.web import serve_http

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 << 20
_BODY_S, _WRITE_S, _SHUTDOWN_S = 60.0, 60.0, 5.0
_CALLER, _TAKING = "HTTP caller", "taking its answer"
_NAME: ContextVar[str] = ContextVar("_NAME")  # of the request's caller
_END = b"data: [DONE]\n\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEYLESS = "HTTP callers"
"""The common name of all callers of a server that requires no key."""
_DIGEST_BYTES = 8


class CallerQuotas:
    """The callers of one server, and their quotas. Used from one event loop.

    Attributes:
        limit: the most choices of one request, and the option that limits them.
    """

    def __init__(self, keys: TokenSource | None, max_choices: int, max_key_choices: int) -> None:
        self._keys = keys
        self._of_all = ClientQuota(max_choices, "choices", "--max-choices")
        self._of_each = ClientQuota(max_key_choices, "choices", "--max-key-choices")
        self.limit = (max_choices, "--max-choices")
        if keys is not None and max_key_choices < max_choices:
            self.limit = (max_key_choices, "--max-key-choices")

    def name(self, authorization: str) -> str | None:
        """Return the caller of a header ``Authorization``; None: it holds no accepted key.

        The name has a digest of the key, and never the key.
        """
        if self._keys is None:
            return KEYLESS
        key = presented_token([(AUTHORIZATION, authorization)])
        if key is None or role_of(self._keys.tokens(), key) is None:
            return None
        digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=_DIGEST_BYTES)
        return f"key {digest.hexdigest()}"

    @contextmanager
    def generating(self, name: str, num_choices: int) -> Iterator[None]:
        """Count choices as under way for a caller during the block.

        Raises:
            ExhaustedError: this caller, or all callers together, have too many.
        """
        # The key's own bound comes first, so that an error names the option that was exceeded.
        of_key = None if name == KEYLESS else name
        with (
            self._of_each.hold(of_key, num_choices),
            self._of_all.hold(KEYLESS, num_choices),
        ):
            yield


@dataclass(frozen=True, slots=True)
class OpenAIServerSettings:
    """What the server offers; the rest is as the options of `sluice serve-openai`.

    Args:
        keys: accepted API keys; None: no key is needed, and pages in browsers are refused.
        max_choices: most choices of all requests that are sampled at once; further requests get
            the status 429.
        max_connections: most open connections; further ones get the status 503 and are closed.
        max_tokens: longest response that the run's context allows; None: the replica decides.
    """

    model_name: str = "policy"
    deadline_s: float | None = None
    keys: TokenSource | None = None
    max_choices: int = 4 * MAX_CHOICES
    max_connections: int = 512
    max_key_choices: int = 2 * MAX_CHOICES
    max_priority: int = 0
    max_tokens: int | None = None


class OpenAIServer:
    """The handlers of chats, completions, ``/v1/models``, ``/health`` and leased samples."""

    def __init__(self, client: AsyncClient, settings: OpenAIServerSettings) -> None:
        self._client = client
        self._settings = settings
        self._sessions = Sessions(client)
        self._callers = CallerQuotas(settings.keys, settings.max_choices, settings.max_key_choices)
        self._bounds = Bounds(
            settings.deadline_s,
            settings.max_priority,
            *self._callers.limit,
            max_tokens=settings.max_tokens,
        )

    def app(self) -> web.Application:
        """Return the application, for aiohttp's runners."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", _health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/s/{lease}/v1/chat/completions", self._leased_chat)
        app.router.add_post("/s/{lease}/end", self._end)
        return app

    @property
    def max_connections(self) -> int:
        """Return the most open connections."""
        return self._settings.max_connections

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and give every failure the dialect's shape."""
        # A lease is a secret, and opens nothing but its sample.
        if request.path != "/health" and not request.path.startswith("/s/"):
            name = self._callers.name(request.headers.get("Authorization", ""))
            if name is None:
                return _refusal_response(NO_KEY)
            _NAME.set(name)
        if self._settings.keys is None and "Origin" in request.headers:
            # Any page open in a browser on this machine can send to the loopback interface.
            return _refusal_response(CROSS_SITE)
        try:
            return await handler(request)
        except SluiceError as error:
            return _refusal_response(error_answer(error))
        except web.HTTPException as error:
            return _refusal_response(
                ErrorAnswer(error.status, error.reason, "invalid_request_error")
            )
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            return _refusal_response(DEFECT)

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["name"])
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "sluice",
        }

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = decode(await _body_of(request), ChatRequest)
        return await self._answer(request, parse_chat(body, self._bounds))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = decode(await _body_of(request), CompletionRequest)
        return await self._answer(request, parse_completion(body, self._bounds))

    async def _leased_chat(self, request: web.Request) -> web.StreamResponse:
        lease, body = request.match_info["lease"], await _body_of(request)
        answer, chunks = await self._sessions.chat(lease, body)
        if chunks is None:
            return _json(answer)
        events = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
        return web.Response(body=events + _END, content_type="text/event-stream")

    async def _end(self, request: web.Request) -> web.StreamResponse:
        await self._sessions.end(request.match_info["lease"], await _body_of(request))
        return _json({"status": "ended"})

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            raise RefusedError(
                f"model: {shorten(name)} is not served; name {self._settings.model_name!r}",
                "model",
                status=404,
                code="model_not_found",
            )

    async def _answer(self, request: web.Request, parsed: ParsedRequest) -> web.StreamResponse:
        self._check_model(parsed.model)
        parsed = _with_trace(parsed, request)
        prefix = "chatcmpl" if parsed.kind == "chat" else "cmpl"
        answer = AnswerBuilder(parsed, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))
        with self._callers.generating(_NAME.get(), parsed.num_choices):
            if parsed.stream:
                return await _EventStream(request, parsed, answer).run(self._client)

            async def take(prompt_index: int, event: GenerationEvent) -> None:
                answer.take(prompt_index, event)

            await _sample_choices(self._client, parsed, take)
        return _json(answer.full_answer())


class _EventStream:
    """One answer as server-sent events; its status waits for the first tokens."""

    def __init__(self, request: web.Request, parsed: ParsedRequest, answer: AnswerBuilder) -> None:
        self._request = request
        self._parsed = parsed
        self._answer = answer
        self._response: web.StreamResponse | None = None
        self._starting = asyncio.Lock()
        self._begun_choices: set[int] = set()  # choices with a chunk that was sent
        self._is_closed = False

    async def run(self, client: AsyncClient) -> web.StreamResponse:
        try:
            await _sample_choices(client, self._parsed, self._take)
        except SluiceError as error:
            if self._response is None:
                raise
            await self._end(error_answer(error).body())
        except Exception:
            if self._response is None:
                raise
            logger.exception("a stream failed")
            await self._end(DEFECT.body())
        else:
            await self._end(self._answer.usage_chunk() if self._parsed.include_usage else None)
        return await self._ensure_started()

    async def _end(self, last_chunk: dict[str, object] | None) -> None:
        """Send the end if the caller still takes it."""
        with suppress(PeerError, DeadlineError):
            if not self._is_closed and last_chunk is not None:
                await self._send(last_chunk)
            if not self._is_closed:
                await self._write(_END)

    async def _take(self, prompt_index: int, event: GenerationEvent) -> None:
        self._answer.take(prompt_index, event)
        if isinstance(event, GenerationStarted | ScoredPrompt):
            return
        chunks = self._answer.chunks(event)  # before any other event is added
        sample = event if isinstance(event, SampleDelta) else event.rollout
        index = sample.sample_index
        if chunks and index not in self._begun_choices:
            self._begun_choices.add(index)
            if (first_chunk := self._answer.first_chunk(index)) is not None:
                await self._send(first_chunk)
        for chunk in chunks:
            await self._send(chunk)

    async def _send(self, chunk: dict[str, object]) -> None:
        await self._write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        """Write to the caller, within a deadline so that one that takes nothing holds no slots.

        Raises:
            PeerError, DeadlineError: the caller is gone.
        """
        try:
            async with deadline(_WRITE_S, peer=_CALLER, phase=_TAKING):
                await (await self._ensure_started()).write(data)
        except DeadlineError:
            self._is_closed = True
            if self._request.transport is not None:
                self._request.transport.abort()
            raise
        except ConnectionError as error:
            self._is_closed = True
            raise PeerError(_CALLER, _TAKING, "it has gone") from error

    async def _ensure_started(self) -> web.StreamResponse:
        # Events of several choices come at once, and the first one sends the headers.
        async with self._starting:
            if self._response is None:
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                self._response = web.StreamResponse(headers=headers)
                await self._response.prepare(self._request)
            return self._response


async def _sample_choices(client: AsyncClient, parsed: ParsedRequest, take: Sink) -> None:
    """Sample the choices. Of a group of errors, raise the first of ours.

    Raises:
        SluiceError: as `AsyncClient.stream` raises it.
    """
    try:
        await generate_choices(client, parsed, take)
    except BaseExceptionGroup as group:
        own_error = next((error for error in leaves(group) if isinstance(error, SluiceError)), None)
        if own_error is None:
            raise
        raise own_error from own_error.__cause__ or group


def _with_trace(parsed: ParsedRequest, request: web.Request) -> ParsedRequest:
    """Return the request below the caller's span. As W3C demands, ignore a malformed header."""
    caller = parse_traceparent(request.headers.get(TRACEPARENT))
    if caller is None:
        return parsed
    return replace(parsed, options=replace(parsed.options, traceparent=caller.traceparent))


async def _body_of(request: web.Request) -> bytes:
    """Return the body. Raise HTTPRequestTimeout or HTTPRequestEntityTooLarge."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"no whole body within {_BODY_S:g} s") from error


async def _health(_request: web.Request) -> web.StreamResponse:
    return _json({"status": "ok"})


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )


def _refusal_response(refusal: ErrorAnswer) -> web.Response:
    return _json(refusal.body(), refusal.status)


def listening(server: OpenAIServer, host: str, port: int) -> AbstractAsyncContextManager[int]:
    """Serve during the block, and yield the port (0 lets the system choose).

    The samples of a caller that disconnects end, which frees its slots.
    """
    return serve_http(
        server.app(),
        host,
        port,
        max_connections=server.max_connections,
        shutdown_s=_SHUTDOWN_S,
    )
