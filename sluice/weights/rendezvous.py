"""Where the members of a group find each other: one TCP store at the sender.

The store lives as long as the sender; each epoch has its own prefix in it, so that keys of a
group that failed are never read again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from sluice.errors import ConfigError, DeadlineError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.owner_thread import StopReason

_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.02


class RendezvousStore:
    """The store's server, listening on one address only.

    Args:
        host: what members are told to connect to.
        port: 0 lets the operating system choose.
        bind_host: the address to listen on; by default `host`.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int = 0, bind_host: str | None = None) -> None:
        address = bind_host or host
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((address, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"rendezvous store {address}:{port}: cannot listen ({error}); use an address of "
                "this host and a free port, or port 0"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        # torch would listen on every interface; a socket that is already bound prevents it.
        self._server: TCPStore | None = TCPStore(
            host_name=address,
            port=self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Stop listening. Groups already formed live on."""
        self._server = None


def reach(host: str, port: int, phase: str, timeout_s: float) -> str:
    """Check that the store can be reached; returns the local address that reaches it.

    Raises:
        DeadlineError: no answer.
        WeightSyncError: the connection is refused or the name does not resolve.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            return str(connection.getsockname()[0])
    except TimeoutError as error:
        raise DeadlineError(f"store {host}:{port}", phase, timeout_s) from error
    except OSError as error:
        raise WeightSyncError(f"store {host}:{port}", phase, f"cannot connect: {error}") from error


def connect(host: str, port: int, epoch: int, timeout_s: float) -> Store:
    """A connection of its own to the keys of one epoch.

    Not shared between epochs: a blocked call holds the lock of its connection.
    """
    client = TCPStore(
        host_name=host,
        port=port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return PrefixStore(f"epoch/{epoch}", client)


def gather(
    store: Store,
    spec: TransferGroupSpec,
    names: Mapping[int, str],
    deadline: float,
    stop_reason: StopReason,
) -> None:
    """Announce this rank and wait until every rank did.

    Torch's constructors only report *that* a member is missing, after the whole timeout and
    without a way to stop; this says which one, and leaves them next to nothing to wait for.

    Args:
        names: of all ranks, for the error.
        deadline: on `time.monotonic`'s clock.

    Raises:
        DeadlineError: some ranks did not come; names them.
        WeightSyncError: there was a reason to stop.
    """
    keys = {rank: f"joined/{rank}" for rank in range(spec.world_size)}
    store.set(keys[spec.rank], "1")
    phase = f"forming the transfer group of epoch {spec.epoch}"
    pause = _POLL_MIN_S
    while missing := _missing(store, keys):
        peers = ", ".join(names[rank] for rank in missing)
        if reason := stop_reason():
            raise WeightSyncError(peers, phase, f"{reason}, before joining")
        if time.monotonic() > deadline:
            raise DeadlineError(
                peers, phase, spec.timeout_s, "probe it, and form a new epoch without it"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_S)


def _missing(store: Store, keys: Mapping[int, str]) -> list[int]:
    """The ranks whose key is not there; one question to the store if all are."""
    if store.check(list(keys.values())):
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]
