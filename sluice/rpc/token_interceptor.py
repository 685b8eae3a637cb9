"""The server interceptor that asks every call for a bearer token, but for checks of health."""

# ruff: noqa: ANN401
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from sluice.errors import AccessDeniedError
from sluice.rpc.error_tally import RPC_ERRORS
from sluice.rpc.health_check import BoundedChecks
from sluice.rpc.method_roles import is_allowed, is_open
from sluice.rpc.status_codes import CLASS_KEY
from sluice.security.token_file import TokenSource
from sluice.security.tokens import role_of

AUTHORIZATION = "authorization"
_SCHEME = "bearer "
_REMEDY = "set sluice.security.token_file, or SLUICE_TOKEN, to one that this service accepts"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED without a valid token, PERMISSION_DENIED for one of a lesser role.

    Methods that do not exist are answered alike, so that nobody can find out what is served.

    Args:
        source: the tokens that are accepted.
    """

    def __init__(self, source: TokenSource) -> None:
        self._source, self._checks = source, BoundedChecks()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Passes the call on, or refuses it before its request is read."""
        method = handler_call_details.method
        if is_open(method):
            handler = await continuation(handler_call_details)
            return None if handler is None else self._checks.bounded(handler)
        presented = presented_token(handler_call_details.invocation_metadata)
        if presented is None:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, f"no bearer token came; {_REMEDY}")
        role = role_of(self._source.tokens(), presented)
        if role is None:
            return _refusal(
                grpc.StatusCode.UNAUTHENTICATED, f"the bearer token is unknown; {_REMEDY}"
            )
        if not is_allowed(role, method):
            return _refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"a token of the role {role} may not call {method}; use one of the role service",
            )
        return await continuation(handler_call_details)


def presented_token(metadata: Any) -> str | None:
    """The bearer token in a call's metadata; none: there is none."""
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value.lower().startswith(_SCHEME):
            return value[len(_SCHEME) :].strip()
    return None


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    RPC_ERRORS.add("server", "any", code.name)  # the method may be any text

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(code, details, ((CLASS_KEY, AccessDeniedError.__name__),))

    # Without deserializers it fits unary and streaming callers alike.
    return grpc.stream_stream_rpc_method_handler(refuse)
