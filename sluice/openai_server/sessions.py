"""Sessions: the address ``/s/LEASE/v1`` of one leased sample, whose answers are trained.

The run samples as training demands. What an agent sends about sampling is noted once and ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import Any

import msgspec

from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import ChatWithImages
from sluice.client.leases import LeasedAnswer
from sluice.errors import LeaseEndedError
from sluice.json_objects import DECODE_ERRORS
from sluice.openai_server.answers import as_delta, message_fields, usage_of
from sluice.openai_server.errors import RefusedError
from sluice.openai_server.requests import Bounds, ChatRequest, decode, parse_chat
from sluice.types import ChatMessage

logger = logging.getLogger(__name__)

# A form of the answer that cannot be kept is refused as elsewhere.
_SHAPING = ("model", "messages", "tools", "tool_choice", "n", "stream")
_KEPT = frozenset((*_SHAPING, "response_format", "functions", "function_call"))
_MAX_LOGGED_FIELDS = 32  # names of ignored fields: any caller may make some up
_MAX_FAILURE_CHARS = 2000

JsonObject = dict[str, Any]


class _End(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None
    failure: str | None = None


class Sessions:
    """The sessions of one server."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._noted: set[str] = set()

    async def chat(self, lease: str, body: bytes) -> tuple[JsonObject, list[JsonObject] | None]:
        """Answer a chat request with a turn of the sample.

        Return the answer and, for a request with ``stream``, its chunks: all of it at once.

        Raises:
            RefusedError: a field is not valid, or the sample can have no further turn.
            NotFoundError: the lease is unknown, or has expired.
        """
        fields = self._fields(body)
        request = decode(json.dumps(fields).encode(), ChatRequest)
        parsed = parse_chat(request, Bounds())
        if parsed.options.n != 1:
            raise RefusedError(f"n: {parsed.options.n}; a leased sample has one answer a turn", "n")
        (messages,) = parsed.prompts
        if isinstance(messages, ChatWithImages) or not isinstance(messages, tuple):
            raise RefusedError("messages: images are not offered in leased samples", "messages")
        turns = tuple(message for message in messages if isinstance(message, ChatMessage))
        canonical = json.dumps(fields, sort_keys=True).encode()
        digest = hashlib.blake2b(canonical, digest_size=32).hexdigest()
        try:
            leased = await self._client.leases().chat(lease, digest, turns, parsed.options.tools)
        except LeaseEndedError as error:
            # Clients of the dialect repeat a request that 409 answers.
            raise RefusedError(str(error), "messages", code="lease_ended") from error
        answer = _answer(parsed.model, digest, leased)
        return answer, _chunks(answer) if parsed.stream else None

    async def end(self, lease: str, body: bytes) -> None:
        """End the sample with ``{"reward": 1.0}``, ``{"failure": "..."}`` or ``{}``.

        Raises:
            RefusedError: the body is not valid.
            NotFoundError: the lease is unknown, or has expired.
            LeaseEndedError: it has ended otherwise.
        """
        try:
            end = msgspec.json.decode(body or b"{}", type=_End)
        except DECODE_ERRORS as error:
            raise RefusedError(f'body: {error}; send {{"reward": 1.0}}', "body") from error
        failure = (
            "" if end.failure is None else (end.failure[-_MAX_FAILURE_CHARS // 4 :] or "failed")
        )
        await self._client.leases().end(lease, reward_value=end.reward, failure=failure)

    def _fields(self, body: bytes) -> JsonObject:
        """Return what shapes the conversation; note the rest."""
        try:
            parsed_body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"body: {error}", "body") from error
        if not isinstance(parsed_body, dict):
            raise RefusedError("body: no JSON object", "body")
        fields = {name: value for name, value in parsed_body.items() if name in _KEPT}
        ignored = {name for name, value in parsed_body.items() if value is not None} - _KEPT
        if fields.get("tool_choice") not in (None, "auto", "none"):
            ignored.add("tool_choice")
            del fields["tool_choice"]
        new_names = {name[:64] for name in ignored} - self._noted
        if new_names and len(self._noted) < _MAX_LOGGED_FIELDS:
            self._noted |= set(sorted(new_names)[:_MAX_LOGGED_FIELDS])
            logger.warning(
                "agents send %s, which leased samples ignore: training samples as the run is "
                "configured",
                ", ".join(sorted(new_names)[:_MAX_LOGGED_FIELDS]),
            )
        return fields


def _answer(model: str, digest: str, leased: LeasedAnswer) -> JsonObject:
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        **message_fields(leased.answer),
    }
    end_reason = "tool_calls" if leased.answer.tool_calls else "stop"
    reason = "length" if leased.is_cut else end_reason
    return {
        "id": f"chatcmpl-{digest[:16]}-{leased.turn}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": usage_of(leased.num_read, leased.num_sampled),
    }


def _chunks(answer: JsonObject) -> list[JsonObject]:
    (choice,) = answer["choices"]
    delta = as_delta(choice["message"])
    first_choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    last_choice = {**first_choice, "delta": {}, "finish_reason": choice["finish_reason"]}
    base = {**answer, "object": "chat.completion.chunk"}
    return [
        {**base, "choices": [first_choice], "usage": None},
        {**base, "choices": [last_choice]},
    ]
