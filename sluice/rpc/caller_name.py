"""Who calls, as far as quotas are concerned: the client that a token or a header names."""

from __future__ import annotations

import hashlib
from typing import Any

from sluice.rpc.token_interceptor import presented_token
from sluice.security.token_file import TokenSource
from sluice.security.tokens import Role, role_of

CLIENT_KEY = "sluice-client"
"""Metadata key of the name that a client gives itself."""
MAX_NAME_LENGTH = 128


def caller_name(metadata: Any, tokens: TokenSource | None) -> str | None:  # noqa: ANN401
    """The client that a call counts for; none: a service of the run, which has no quota.

    A token of the role client names its holder, whatever else the call says, so that nobody gets
    more by changing names. Without tokens, and for services, the name under `CLIENT_KEY` counts.

    Args:
        metadata: pairs of key and value, as gRPC gives them.
        tokens: that the service accepts; none: it asks for none.
    """
    presented = presented_token(metadata) if tokens is not None else None
    if tokens is not None and presented is not None:
        is_client = role_of(tokens.tokens(), presented) is Role.CLIENT
        if is_client:
            digest = hashlib.blake2b(presented.encode(errors="surrogateescape"), digest_size=4)
            return f"token {digest.hexdigest()}"
    names = [value for key, value in metadata or () if key == CLIENT_KEY]
    return names[0][:MAX_NAME_LENGTH] if names and isinstance(names[0], str) and names[0] else None
