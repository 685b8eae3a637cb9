"""Who asks the front, and how many choices are drawn for each at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from sluice.rpc.client_quota import ClientQuota
from sluice.security.token_file import TokenSource
from sluice.security.tokens import role_of

__all__ = ["KEYLESS", "Callers"]

KEYLESS = "HTTP callers"
"""All callers of a front that asks for no key: nothing tells them apart."""
_SCHEME = "bearer "
_DIGEST_BYTES = 8


class Callers:
    """The callers of one front. Used from one event loop.

    Args:
        keys: that are accepted; none: nobody is asked for one.
        max_choices: most choices that are drawn at once, of all requests.
        max_key_choices: the same for the requests of one key.
    """

    def __init__(self, keys: TokenSource | None, max_choices: int, max_key_choices: int) -> None:
        self._keys = keys
        self._of_all = ClientQuota(max_choices, "choices", "--max-choices")
        self._of_each = ClientQuota(max_key_choices, "choices", "--max-key-choices")
        self._limit = (max_choices, "--max-choices")
        if keys is not None and max_key_choices < max_choices:
            self._limit = (max_key_choices, "--max-key-choices")

    @property
    def limit(self) -> tuple[int, str]:
        """Most choices of a request that are ever drawn, and the option that says so."""
        return self._limit

    def name(self, authorization: str) -> str | None:
        """The caller of a header ``Authorization``; none: it holds no key that is accepted.

        A digest stands for the key, which is told to nobody.
        """
        if self._keys is None:
            return KEYLESS
        if not authorization.lower().startswith(_SCHEME):
            return None
        key = authorization[len(_SCHEME) :].strip()
        if role_of(self._keys.tokens(), key) is None:
            return None
        digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=_DIGEST_BYTES)
        return f"key {digest.hexdigest()}"

    @contextmanager
    def generating(self, name: str, num_choices: int) -> Iterator[None]:
        """Counts choices as drawn for a caller for the length of the block.

        Raises:
            ExhaustedError: too many are drawn for it, or for all callers.
        """
        of_key = None if name == KEYLESS else name
        with (
            self._of_each.held(of_key, num_choices),
            self._of_all.held(KEYLESS, num_choices),
        ):
            yield
