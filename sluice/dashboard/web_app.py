"""The page's HTTP server. No other module here imports aiohttp (the extra `dashboard`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from sluice.dashboard.live_status import LiveStatus
from sluice.dashboard.page import (
    HEADERS,
    PageFile,
    Query,
    admits,
    etag_of,
    is_cross_site,
    is_loopback_name,
    page_files,
    parse_cursor,
    parse_filter,
    parse_metric,
    parse_ordinal,
    parse_page_size,
    parse_points,
    parse_text,
)
from sluice.dashboard.run_data import RunData
from sluice.errors import InvalidRequestError
from sluice.security.token_file import TokenSource

logger = logging.getLogger(__name__)

_DATA = "/api/"
_AnswerT = TypeVar("_AnswerT")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardPage:
    """Answers ``/`` and its files, ``/api/…``, ``/health``.

    Args:
        data: the run's folder, which a thread reads before each answer; it reads nothing while
            no browser asks.
        live: the run's services.
        tokens: a request for data has to carry one of these; ``None``: it needs no token.
        only_loopback: answer only requests that were sent to a name of the loopback interface.
    """

    def __init__(
        self, data: RunData, live: LiveStatus, tokens: TokenSource | None, *, only_loopback: bool
    ) -> None:
        self._data = data
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run folder")
        self._is_broken = False
        self._live = live
        self._tokens, self._only_loopback = tokens, only_loopback

    def app(self) -> web.Application:
        """Return the application for aiohttp's runners."""
        app = web.Application(client_max_size=1 << 16, middlewares=[self._guard])
        for path, file in page_files().items():
            app.router.add_get(path, _file_handler(file))
        app.router.add_get("/health", _health)
        data = self._data
        questions: dict[str, Callable[[Query], dict[str, Any]]] = {
            "curves": lambda query: data.curves(parse_points(query)),
            "metrics": lambda _query: data.metrics(),
            "metric": lambda query: data.metric(parse_metric(query), parse_points(query)),
            "runs": lambda query: data.runs(parse_points(query)),
            "settings": lambda _query: data.settings(),
            "logs": lambda query: data.log(parse_text(query, "service")),
            "comparison": lambda _query: data.comparison(),
            "samples": lambda query: data.samples(
                parse_filter(query),
                parse_text(query, "text"),
                parse_cursor(query),
                parse_page_size(query),
            ),
        }
        for name, question in questions.items():
            app.router.add_get(f"{_DATA}{name}", partial(self._answer_question, question))
        app.router.add_get(f"{_DATA}overview", self._overview)
        app.router.add_get(f"{_DATA}samples/{{ordinal}}", self._group)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that the settings exclude; add the security headers to every answer."""
        try:
            answer = self._refusal(request) or await handler(request)
        except InvalidRequestError as error:
            answer = _refusal_response(400, str(error))
        except web.HTTPException as error:
            answer = _refusal_response(error.status, error.reason)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            answer = _refusal_response(500, "a defect of the page; see the log of its process")
        answer.headers.update(HEADERS)
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._only_loopback and not is_loopback_name(request.host):
            return _refusal_response(
                403, "host: this page serves its own machine only; open it as localhost"
            )
        if request.path.startswith(_DATA):
            if is_cross_site(request.headers):
                return _refusal_response(403, "requests from pages of other sites are refused")
            if not admits(self._tokens, request.headers.get("Authorization", "")):
                refused = _refusal_response(
                    401, "give a token of the run's sluice.security.token_file"
                )
                refused.headers["WWW-Authenticate"] = 'Bearer realm="sluice"'
                return refused
        return None

    async def _overview(self, request: web.Request) -> web.StreamResponse:
        live = await self._live.ask()
        return _json(request, await self._ask_data(lambda: self._data.overview(live)))

    async def _answer_question(
        self, question: Callable[[Query], dict[str, Any]], request: web.Request
    ) -> web.StreamResponse:
        return _json(request, await self._ask_data(lambda: question(request.query)))

    async def _group(self, request: web.Request) -> web.StreamResponse:
        ordinal = parse_ordinal(request.match_info["ordinal"])
        group = await self._ask_data(lambda: self._data.group(ordinal))
        if group is None:
            return _refusal_response(404, "this group was deleted; go back to the list")
        return _json(request, group)

    async def _ask_data(self, question: Callable[[], _AnswerT]) -> _AnswerT:
        """Return the answer to a question, after new content of the run's folder was read."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._read_and_answer, question)

    def _read_and_answer(self, question: Callable[[], _AnswerT]) -> _AnswerT:
        try:
            self._data.read()
            self._is_broken = False
        except Exception as error:
            # Logged once; the page shows what it has, and the next question tries again.
            if not self._is_broken:
                is_defect = not isinstance(error, OSError)
                reason = (
                    "cannot be understood, a defect of the page" if is_defect else "is unreadable"
                )
                logger.warning("the run's folder %s: %s", reason, error, exc_info=is_defect)
            self._is_broken = True
        return question()

    def close(self) -> None:
        """End the thread after its present work, and cancel the waiting questions."""
        self._thread.shutdown(wait=False, cancel_futures=True)


async def _health(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})


def _file_handler(file: PageFile) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return _respond(request, file.body, file.content_type, file.etag)

    return answer


def _json(request: web.Request, content: dict[str, Any]) -> web.Response:
    body = msgspec.json.encode(content)
    return _respond(request, body, "application/json", etag_of(body))


def _respond(request: web.Request, body: bytes, content_type: str, etag: str) -> web.Response:
    """Return the body, or 304 if the browser has it already."""
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("If-None-Match") == etag:
        return web.Response(status=304, headers=headers)
    answer = web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)
    answer.enable_compression()
    return answer


def _refusal_response(status: int, reason: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": reason}})
    return web.Response(body=body, status=status, content_type="application/json")
