"""The HTTP front of a client, on a socket of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from sluice.client import AsyncClient, RetryPolicy, RunAddress
from sluice.openai_server.web_app import OpenAIServer, OpenAIServerSettings, listening

QUICK = RetryPolicy(first_s=0.01, max_s=0.02, patience_s=0.2)


@dataclass
class HttpFront:
    """A front that listens, and a plain HTTP client of it."""

    base_url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.session.post(f"{self.base_url}{path}", json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with self.session.get(f"{self.base_url}{path}", **options) as answer:
            return answer.status, await answer.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Server-sent events; the last is the text ``[DONE]``."""
        async with self.session.post(f"{self.base_url}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            lines = (await answer.text()).split("\n\n")
        texts = [line.removeprefix("data: ") for line in lines if line]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


@asynccontextmanager
async def http_front(
    *replicas: str, settings: OpenAIServerSettings | None = None
) -> AsyncIterator[HttpFront]:
    """A front on replicas at these addresses, for the length of the block."""
    async with (
        AsyncClient(RunAddress(replicas=replicas), policy=QUICK) as client,
        listening(OpenAIServer(client, settings or OpenAIServerSettings()), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as session,
    ):
        yield HttpFront(f"http://127.0.0.1:{port}", session)
