"""Where the members of a group find each other: one store of keys at the sender.

The store lives as long as the sender and knows the keys of one epoch, the newest; what belongs
to a group that failed is forgotten when the next one begins, and its late members are refused. So
is whoever does not have the epoch's secret (`sluice.weights.store_seal`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial

from sluice.config.host_port import bare_host, join_host_port
from sluice.errors import ConfigError
from sluice.types import TransferGroupSpec
from sluice.weights.key_table import KeyTable
from sluice.weights.store_link import StoreLink
from sluice.weights.store_messages import Answer, Question, Write, from_body, to_body
from sluice.weights.store_server import StoreServer

_BACKLOG = 128


class RendezvousStore:
    """The store's server, listening on one address only.

    Args:
        host: what members are told to connect to; a name, or an address of IPv4 or IPv6.
        port: 0 lets the operating system choose.
        bind_host: the address to listen on; by default `host`.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int = 0, bind_host: str | None = None) -> None:
        self.host = bare_host(host)
        listener = _listen(bare_host(bind_host or host), port)
        self.port: int = listener.getsockname()[1]
        self._server = StoreServer(listener)

    def begin(self, epoch: int, store_key: bytes = b"") -> None:
        """Forget the keys of earlier epochs and take those of this one.

        Args:
            store_key: the epoch's secret. The members of an earlier one do not have it; an empty
                one keeps nobody out.
        """
        table = KeyTable()
        table.begin(epoch)
        self._server.serve(store_key, partial(_answer, table))

    def close(self) -> None:
        """Stop listening. Groups already formed live on."""
        self._server.close()


def _answer(table: KeyTable, body: bytes) -> bytes:
    try:
        return to_body(table.answer(from_body(body, Question)))
    except ValueError as error:
        return to_body(Answer(refusal=str(error)))


def gather(link: StoreLink, spec: TransferGroupSpec, names: Mapping[int, str]) -> None:
    """Announce this rank and wait until every rank did.

    Torch's constructors would only report *that* a member is missing; this says which one, and
    leaves them next to nothing to wait for.

    Args:
        names: of all ranks, for the error.

    Raises:
        DeadlineError: some ranks did not come within the spec's timeout; names them.
        WeightSyncError: there was a reason to stop, or the store refused.
    """
    link.ask(Write(_joined(spec.rank), b"1"))

    def owners(ranks: Sequence[int]) -> str:
        return ", ".join(names[rank] for rank in ranks)

    link.await_keys([_joined(rank) for rank in range(spec.world_size)], spec.timeout_s, owners)


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _listen(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(
            (address, port),
            family=family,
            backlog=_BACKLOG,
            # Like the servers of gRPC: "every interface" includes those of IPv4.
            dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise ConfigError(
            f"rendezvous store {join_host_port(address, port)}: cannot listen ({error}); "
            "use an address of this host and a free port, or port 0"
        ) from error
