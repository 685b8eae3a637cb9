"""Who is answered, and what the browser is told to refuse."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from sluice.config.host_port import bare_host, split_host_port
from sluice.errors import ConfigError
from sluice.security.token_file import TokenSource
from sluice.security.tokens import role_of

__all__ = ["HEADERS", "admits", "is_cross_site", "is_loopback_name"]

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # A script that assigned text as markup would fail, ours included.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""Of every answer. All that a model or a prompt says is hostile."""

_SCHEME = "bearer "


def is_loopback_name(host: str) -> bool:
    """Whether the ``Host`` header of a request names this machine's loopback interface.

    A page of another site whose name was made to lead here (DNS rebinding) sends its own name.
    """
    try:
        name, _ = split_host_port(host)
    except ConfigError:
        return False
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare_host(name)).is_loopback
    except ValueError:
        return False


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another site sends the request."""
    return headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}


def admits(tokens: TokenSource | None, authorization: str) -> bool:
    """Whether an ``Authorization`` header shows one of the tokens; without any all are let in."""
    if tokens is None:
        return True
    if not authorization.lower().startswith(_SCHEME):
        return False
    return role_of(tokens.tokens(), authorization[len(_SCHEME) :].strip()) is not None
