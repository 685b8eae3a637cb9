"""The rendezvous store as torch's process groups want it.

Torch's own TCP store asks a name server for the name of each address that connects (only to log
it), and an answer that is lost costs 5 s, more than a formation may take. It also cannot be told
to stop. Here the constructors' waits end by our deadlines, with our errors, which pass through
torch unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from sluice.weights.store_link import StoreLink
from sluice.weights.store_messages import Add, Delete, Read, Replace, Write


class EpochStore(Store):
    """The keys of one epoch.

    Torch refers to the C++ half of this object only: keep a reference as long as the group lives.

    Args:
        link: where the keys are.
        timeout_s: how long `get` waits for a key.
        peers: the other members, for errors.
    """

    def __init__(self, link: StoreLink, timeout_s: float, peers: str) -> None:
        super().__init__()
        self._link, self._timeout_s, self._peers = link, timeout_s, peers
        self._clones: list[EpochStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._link.ask(Write(key, _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a key; its value."""
        return self._await([key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return None not in self._link.ask(Read(tuple(keys)))

    def add(self, key: str, value: int) -> int:
        """Add to a number; the sum."""
        return int(_only(self._link.ask(Add(key, value))))

    def compare_set(  # torch passes bytes where its stubs say str
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Write a key if it holds what is expected; what it holds then."""
        replace = Replace(key, _as_bytes(expected_value), _as_bytes(desired_value))
        return _only(self._link.ask(replace))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._link.ask(Delete(key)) != (None,)

    # Torch's C++ looks this one method up by its C++ name.
    deleteKey = delete_key

    def clone(self) -> EpochStore:
        """The same keys, for another thread of torch."""
        clone = EpochStore(self._link, self._timeout_s, self._peers)
        self._clones.append(clone)
        return clone

    def _await(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        return self._link.await_keys(keys, timeout_s, lambda _: self._peers)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _only(values: tuple[bytes | None, ...]) -> bytes:
    """The one value of an answer to `Add` or `Replace`, which always have one."""
    (value,) = values
    if value is None:
        raise ValueError("the store answered no value")
    return value
