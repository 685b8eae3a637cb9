"""Hostile HTTP requests to the sessions of leased samples, ``/s/LEASE/v1`` and ``/s/LEASE/end``."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from tools.fuzz.messages import corrupted, random_bytes
from tools.fuzz.nasty_values import nasty_text

CHAT, END = "/s/LEASE/v1/chat/completions", "/s/LEASE/end"
_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "policy",
        "messages": [
            {"role": "user", "content": "1 + 2 = ?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "call_0"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        "tool_choice": "auto",
        "stream": False,
        "temperature": 1.0,
    },
    END: {"reward": 1.0, "failure": None},
}
_OTHERS: tuple[object, ...] = (
    None,
    True,
    -1,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"a": {}},
)


class OpenAITraffic:
    """Makes one request at a time.

    Args:
        session: its requests; its base is the server.
        rng: the only source of randomness.
    """

    def __init__(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        self._session, self._rng = session, rng

    async def send(self, leases: Sequence[str]) -> tuple[str, str, str, bytes]:
        """Send a request, as a rule for one of these leases; an answer that does not come, or
        breaks off, is one too.

        Returns:
            the path without its lease; ``HTTP`` and the status, or what came in place of an answer;
            the text of the answer; the body that was sent.
        """
        rng = self._rng
        path = rng.choice((CHAT, CHAT, END))
        lease = rng.choice(leases) if leases and rng.random() < 0.8 else nasty_text(rng)[:200]
        name = quote(lease, safe="", errors="replace") or "fuzz"
        sent = self._body(path)
        target = path.replace("LEASE", name if name.strip(".") else "fuzz")
        try:
            async with self._session.post(target, data=sent) as answer:
                text, code = await answer.text(), f"HTTP {answer.status}"
        except TimeoutError:
            text, code = "", "HTTP late"
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            text, code = repr(error), "HTTP disconnected"
        except aiohttp.ClientError as error:
            text, code = repr(error), "HTTP unreadable"
        return path, code, text, sent

    def _body(self, path: str) -> bytes:
        rng = self._rng
        body = copy.deepcopy(_BODIES[path])
        if path == CHAT and rng.random() < 0.5:
            del body["messages"][1:], body["tools"]
        match rng.randrange(10):
            case 0:
                return random_bytes(rng)
            case 1:
                return corrupted(json.dumps(body).encode(), rng)
            case 2:
                return json.dumps(body).encode()
            case 3:
                depth = rng.choice((30, rng.randrange(200, 1100), 200_000))
                return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
        for _ in range(rng.randint(1, 3)):
            _spoil(body, rng)
        return json.dumps(body).encode()


def _spoil(value: Any, rng: random.Random) -> None:  # noqa: ANN401  any part of a body
    """Replace something in an object or a list, at any depth."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = rng.choice(places)
        inner = value[place]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        value = inner
    if isinstance(value, list) and rng.random() < 0.3:
        value.extend([inner] * rng.choice((1, 3, 200, 3000)))
    else:
        other = rng.choice(_OTHERS)
        value[place] = nasty_text(rng) if rng.random() < 0.5 else copy.deepcopy(other)
