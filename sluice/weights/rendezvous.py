"""Rendezvous of a transfer group: the store at the sender, and each member's connection to it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import Store

from sluice.concurrency.threads import StopReason
from sluice.config.addresses import bare_host, join_host_port
from sluice.errors import ConfigError, DeadlineError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.store import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    Action,
    Add,
    Conversation,
    Delete,
    FrameKind,
    KeyTable,
    Read,
    Replace,
    StoreAnswer,
    StoreQuestion,
    StoreServer,
    Write,
    from_body,
    signed_length,
    to_body,
)

_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.02


class StoreLink:
    """The keys of one epoch, as one member sees them. Any thread may ask.

    Only addresses are used: a name in the spec is resolved once, here, and no address is ever
    turned into a name.

    Args:
        spec: where the store is, the epoch and its secret, and how long to wait for it.
        phase: what the keys are for, in errors.
        stop_reason: ends every wait.

    Raises:
        DeadlineError: the store does not answer.
        WeightSyncError: the connection is refused or the name does not resolve.
    """

    def __init__(self, spec: TransferGroupSpec, phase: str, stop_reason: StopReason) -> None:
        self._epoch, self._timeout_s = spec.epoch, spec.timeout_s
        self._store_key = spec.store_key
        self._phase, self._stop_reason = phase, stop_reason
        self._store = f"store {join_host_port(spec.host, spec.port)}"
        self._address: tuple[str, int] = (bare_host(spec.host), spec.port)
        with self._connect() as connection:
            self._address = connection.getpeername()[:2]
            self.local_address: str = connection.getsockname()[0]

    def ask(self, action: Action) -> tuple[bytes | None, ...]:
        """Put one question to the store; the values of its answer.

        Raises:
            DeadlineError: no answer within the spec's timeout.
            WeightSyncError: the connection broke, the store ended it because another epoch has
                begun, it refused because a bound is broken, or what answers is not the store.
        """
        try:
            question = to_body(StoreQuestion(self._epoch, action))
            with self._connect() as connection:
                answer = from_body(self._exchange(connection, question), StoreAnswer)
        except TimeoutError as error:
            raise DeadlineError(self._store, self._phase, self._timeout_s) from error
        except ConnectionError as error:
            detail = f"{error}: it is gone, or epoch {self._epoch} is over and so is its key"
            raise WeightSyncError(self._store, self._phase, detail) from error
        except (OSError, ValueError) as error:
            raise WeightSyncError(self._store, self._phase, str(error)) from error
        if answer.refusal is not None:
            raise WeightSyncError(self._store, self._phase, answer.refusal)
        return answer.values

    def await_keys(
        self, keys: Sequence[str], timeout_s: float, owners: Callable[[Sequence[int]], str]
    ) -> list[bytes]:
        """Ask until all keys are there; their values.

        Args:
            keys: what to wait for.
            timeout_s: from this call on.
            owners: who did not write the keys of these indexes, for the error.

        Raises:
            DeadlineError: some did not come; names their owners.
            WeightSyncError: there was a reason to stop, or see `ask`.
        """
        deadline = time.monotonic() + timeout_s
        pause = _POLL_MIN_S
        while True:
            values = self.ask(Read(tuple(keys)))
            missing = [index for index, value in enumerate(values) if value is None]
            if not missing:
                return [value for value in values if value is not None]
            if reason := self._stop_reason():
                raise WeightSyncError(owners(missing), self._phase, f"{reason}, before joining")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    owners(missing),
                    self._phase,
                    timeout_s,
                    "probe it, and form a new epoch without it",
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MAX_S)

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(self._address, timeout=self._timeout_s)
        except TimeoutError as error:
            raise DeadlineError(self._store, self._phase, self._timeout_s) from error
        except OSError as error:
            raise WeightSyncError(self._store, self._phase, f"cannot connect: {error}") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _exchange(self, connection: socket.socket, question: bytes) -> bytes:
        """Prove the key and ask; the answer's body. ``TimeoutError`` after the timeout in all."""
        deadline = time.monotonic() + self._timeout_s
        nonce = secrets.token_bytes(NONCE_BYTES)
        conversation = Conversation(_receive(connection, NONCE_BYTES, deadline), nonce)
        proof = conversation.proof(self._store_key)
        frame = conversation.sign(self._store_key, FrameKind.QUESTION, question)
        connection.sendall(nonce + proof + frame)
        header = _receive(connection, FRAME_HEADER.size, deadline)
        signed_frame = _receive(connection, signed_length(header, MAX_FRAME_BYTES), deadline)
        return conversation.open(self._store_key, FrameKind.ANSWER, signed_frame)


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        chunk = connection.recv(num_bytes - len(received))
        if not chunk:
            raise ConnectionError("the store closed the connection")
        received += chunk
    return bytes(received)


# The rendezvous store as torch's process groups want it.
#
# Torch's own TCP store asks a name server for the name of each address that connects (only to
# log it), and an answer that is lost costs 5 s, more than a formation may take. It also cannot
# be told to stop. Here the constructors' waits end by our deadlines, with our errors, which pass
# through torch unchanged.


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


# Where the members of a group find each other: one store of keys at the sender.
#
# The store lives as long as the sender and knows the keys of one epoch, the newest; what belongs
# to a group that failed is forgotten when the next one begins, and its late members are refused.
# So is whoever does not have the epoch's secret (`sluice.weights.store`).

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
        return to_body(table.answer(from_body(body, StoreQuestion)))
    except ValueError as error:
        return to_body(StoreAnswer(refusal=str(error)))


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
