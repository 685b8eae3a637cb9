"""How much each client has under way, and the most that one may have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.rpc.error_tally import QUOTA_REFUSALS


class ClientQuota:
    """Counts units by client. Used from one event loop.

    Args:
        most: units that one client may have at once.
        unit: what is counted, in the plural, for errors.
        key: the setting that says `most`, for errors.
    """

    def __init__(self, most: int, unit: str, key: str) -> None:
        self._most, self._unit, self._key = most, unit, key
        self._held: dict[str, int] = {}

    def in_use(self, client: str | None) -> int:
        """Units that a client has."""
        return self._held.get(client, 0) if client is not None else 0

    @contextmanager
    def held(self, client: str | None, amount: int) -> Iterator[None]:
        """Has `amount` units in use for the length of the block; without a client nothing counts.

        Nor does an amount of 0, which is in use by nobody.

        Raises:
            ExhaustedError: the client would have too many; names it and the setting.
            InvalidRequestError: they are more than anybody may have, so that waiting does not help.
        """
        if client is None or not amount:
            yield
            return
        before = self.in_use(client)
        if amount > self._most:
            QUOTA_REFUSALS.add(self._key)
            raise InvalidRequestError(
                f"client {client!r}: {amount} {self._unit} were asked for at once; {self._key} "
                f"allows {self._most}: ask for fewer, or raise it"
            )
        if before + amount > self._most:
            QUOTA_REFUSALS.add(self._key)
            raise ExhaustedError(
                f"client {client!r}: {before} {self._unit} are under way and {amount} more were "
                f"asked for; {self._key} allows {self._most}: wait for some to end"
            )
        self._held[client] = before + amount
        try:
            yield
        finally:
            self._held[client] -= amount
            if not self._held[client]:
                del self._held[client]
