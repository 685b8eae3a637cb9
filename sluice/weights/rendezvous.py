"""A key-value store by which the members of an epoch find each other: a gRPC server at the sender,
and each member's connection, which torch's process groups use as a store.

The server lives as long as the sender and holds the keys of one epoch, the newest. It answers only
members that have the epoch's secret, and never waits: a member that needs a key polls, so that its
own deadline and its caller's stop end the wait and the error names the missing members.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import grpc
from torch._C._distributed_c10d import Store

from sluice.api.weights.v1 import weights_pb2 as messages
from sluice.api.weights.v1 import weights_pb2_grpc as services
from sluice.concurrency.threads import StopReason
from sluice.config.addresses import bare_host, join_host_port
from sluice.errors import ConfigError, DeadlineError, WeightSyncError
from sluice.types import TransferCertificates, TransferGroupSpec

KEY_BYTES = 32
"""Length of a secret."""
KEY_METADATA = "store-key-bin"  # the suffix lets gRPC carry bytes
MAX_MESSAGE_BYTES = 1 << 20
MAX_RANK_MESSAGE_BYTES = 64 << 20
"""Between trainer ranks: a call to join names every class and every worker."""
MAX_VALUE_BYTES = 256 << 10
MAX_KEY_CHARS = 256
MAX_KEYS_ASKED = 4096
MAX_KEYS = 65536  # 2048 workers with eight ranks that send: three keys for each pair
MAX_TABLE_BYTES = 256 << 20

_HANDLER_THREADS = 4
_CLOSE_GRACE_S = 0.5
_CLOSE_TIMEOUT_S = 10.0
_POLL_MIN_S, _POLL_MAX_S = 0.001, 0.02
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Members whose machine vanished, and strangers that send nothing, lose their connection.
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A separate connection: a shared one would also share the pause after a failed attempt.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC closes an idle channel after one to two times this. The server does it later, and its
    # client would print a line about that to standard error.
    ("grpc.client_idle_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_log = logging.getLogger(__name__)
_RequestT = TypeVar(
    "_RequestT", messages.PutKeyRequest, messages.GetKeysRequest, messages.AddToKeyRequest
)
_AnswerT = TypeVar("_AnswerT")


class RendezvousStore:
    """The server. Before `begin` it accepts no member.

    Args:
        host: the address that members connect to; a name, or an address of IPv4 or IPv6.
        port: 0 lets the operating system choose.
        bind_host: the address to listen on; by default `host`.
        certificates: TLS certificates; without them connections are not encrypted.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        bind_host: str | None = None,
        certificates: TransferCertificates | None = None,
    ) -> None:
        self.host = bare_host(host)
        self._keys = _Keys()
        self._threads = ThreadPoolExecutor(_HANDLER_THREADS, thread_name_prefix="weights-store")
        self._server = member_server(self._threads, self._keys.is_member)
        services.add_RendezvousServiceServicer_to_server(self._keys, self._server)
        self.port = bind(self._server, bare_host(bind_host or host), port, certificates)
        self._server.start()

    def begin(self, epoch: int, store_key: bytes = b"") -> None:
        """Forget the keys of earlier epochs and hold the keys of this one.

        Args:
            store_key: the epoch's secret, unknown to members of earlier epochs. With an empty one
                every caller is a member.
        """
        self._keys.begin(epoch, store_key)

    def close(self) -> None:
        """Stop listening. Formed groups stay intact. Idempotent."""
        stop_server(self._server, self._threads)


def stop_server(server: grpc.Server, threads: ThreadPoolExecutor) -> None:
    """Cancel the calls of a `member_server` after a moment; its handlers keep deadlines."""
    if not server.stop(_CLOSE_GRACE_S).wait(_CLOSE_TIMEOUT_S):
        _log.warning("gRPC did not stop a server within %g s; it is left behind", _CLOSE_TIMEOUT_S)
    threads.shutdown()


def member_server(
    threads: ThreadPoolExecutor,
    is_member: Callable[[bytes], bool],
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Server:
    """Return a server that answers only callers with a member's `KEY_METADATA`."""
    options = (*_message_limits(max_bytes), *_SERVER_OPTIONS)
    return grpc.server(threads, interceptors=[_MembersOnly(is_member)], options=options)


class _MembersOnly(grpc.ServerInterceptor):
    """Refuses strangers by the metadata of their call, before its message arrives.

    gRPC's server keeps a thread for each call while it waits for the message, so a stranger that
    opens calls and sends nothing would take all threads from the members.
    """

    def __init__(self, is_member: Callable[[bytes], bool]) -> None:
        self._is_member = is_member

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        call: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method for members, and for others a refusal that reads no message."""
        key = dict(call.invocation_metadata).get(KEY_METADATA, b"")
        if self._is_member(key if isinstance(key, bytes) else key.encode()):
            return continuation(call)
        return grpc.stream_unary_rpc_method_handler(_refuse_stranger)


def _refuse_stranger(_unread: object, context: grpc.ServicerContext) -> NoReturn:
    _log.warning("weights: the server refuses a call of %s: wrong key", context.peer())
    context.abort(
        grpc.StatusCode.PERMISSION_DENIED,
        "the epoch is over or has not begun, or this is not its key",
    )
    raise AssertionError  # `abort` raises; its stub does not declare so


def bind(
    server: grpc.Server, host: str, port: int, certificates: TransferCertificates | None
) -> int:
    """Listen there, with TLS if there are certificates; return the port. Raise ConfigError."""
    address = join_host_port(host, port)
    try:
        # gRPC reports only that it cannot bind; the operating system also reports why.
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
        if certificates is None:
            return server.add_insecure_port(address)
        assert certificates.key is not None
        assert certificates.certificate is not None
        credentials = grpc.ssl_server_credentials(
            [(certificates.key, certificates.certificate)],
            certificates.authority if certificates.asks_certificate else None,
            require_client_auth=certificates.asks_certificate,
        )
        return server.add_secure_port(address, credentials)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"rendezvous store {address}: cannot listen ({error}); use an address of this host and "
            "a free port, or port 0"
        ) from error


class _Keys(services.RendezvousServiceServicer):
    """Keys and values of the newest epoch. Refused calls change nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._store_key = b""
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0

    def begin(self, epoch: int, store_key: bytes) -> None:
        with self._lock:
            self._epoch = epoch
            self._store_key = store_key
            self._values = {}
            self._num_bytes = 0

    def is_member(self, store_key: bytes) -> bool:
        """Return whether this is the secret of the current epoch."""
        with self._lock:
            return self._epoch is not None and hmac.compare_digest(store_key, self._store_key)

    def PutKey(
        self, request: messages.PutKeyRequest, context: grpc.ServicerContext
    ) -> messages.PutKeyResponse:
        with self._lock:
            self._admit(request, context)
            stored = self._values.get(request.key)
            if request.HasField("expected") and (
                (stored or b"") != request.expected or (stored is None and request.expected)
            ):
                # Like torch's own stores: a missing key is reported as the value expected of it.
                return messages.PutKeyResponse(value=request.expected if stored is None else stored)
            if request.HasField("value"):
                self._put(request.key, request.value, context)
                return messages.PutKeyResponse(value=request.value)
            if self._values.pop(request.key, None) is not None:
                self._num_bytes -= len(request.key) + len(stored or b"")
            return messages.PutKeyResponse(value=stored)

    def GetKeys(
        self, request: messages.GetKeysRequest, context: grpc.ServicerContext
    ) -> messages.GetKeysResponse:
        with self._lock:
            self._admit(request, context)
            if len(request.keys) > MAX_KEYS_ASKED:
                _abort_call(context, f"{len(request.keys)} keys; at most {MAX_KEYS_ASKED}")
            values = {key: self._values[key] for key in request.keys if key in self._values}
        if (
            size := sum(len(key) + len(value) for key, value in values.items())
        ) > MAX_MESSAGE_BYTES:
            _abort_call(
                context, f"the values have {size} bytes; at most {MAX_MESSAGE_BYTES} may travel"
            )
        return messages.GetKeysResponse(values=values)

    def AddToKey(
        self, request: messages.AddToKeyRequest, context: grpc.ServicerContext
    ) -> messages.AddToKeyResponse:
        with self._lock:
            self._admit(request, context)
            stored = self._values.get(request.key, b"0")
            try:
                total = int(stored) + request.amount
            except ValueError:
                _abort_call(context, f"{stored[:20]!r} is not a number")
            if not -(1 << 63) <= total < 1 << 63:
                _abort_call(context, f"the sum {total} does not fit into 64 bits")
            self._put(request.key, str(total).encode(), context)
        return messages.AddToKeyResponse(sum=total)

    def _admit(self, request: _RequestT, context: grpc.ServicerContext) -> None:
        # The epoch may have changed since the interceptor compared the secret.
        if request.epoch != self._epoch:
            _log.warning("weights: the store refuses a call of %s: wrong key", context.peer())
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"the epoch {request.epoch} is over or has not begun, or this is not its key",
            )

    def _put(self, key: str, value: bytes, context: grpc.ServicerContext) -> None:
        if not 0 < len(key) <= MAX_KEY_CHARS:
            _abort_call(context, f"a key of {len(key)} characters; use 1 to {MAX_KEY_CHARS}")
        if len(value) > MAX_VALUE_BYTES:
            _abort_call(context, f"a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} fit")
        stored = self._values.get(key)
        growth = len(value) - len(stored) if stored is not None else len(key) + len(value)
        num_keys = len(self._values) + (stored is None)
        if num_keys > MAX_KEYS or self._num_bytes + growth > MAX_TABLE_BYTES:
            _abort_call(
                context,
                f"the store is full: {num_keys} keys, {self._num_bytes + growth} bytes with "
                f"this one; at most {MAX_KEYS} keys and {MAX_TABLE_BYTES} bytes fit",
            )
        self._values[key] = value
        self._num_bytes += growth


def _abort_call(context: grpc.ServicerContext, reason: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
    raise AssertionError  # `abort` raises; its stub does not declare so


class EpochStore(Store):
    """The keys of a group of an epoch, for its members and for torch's process groups.

    Its waits have our deadlines and errors, which pass through torch unchanged. Torch holds only
    the C++ half of this object: keep a reference as long as the group lives. Any thread may call
    it. A host name in the spec is resolved once, here; addresses are never resolved to names.

    Args:
        spec: where the store is, the epoch and its secret, and how long to wait for each answer
            and for each key.
        phase: the purpose of the keys, for errors.
        peers: the other members, for errors.
        stop_reason: returns a reason to stop, which ends every wait.

    Raises (all methods, too):
        DeadlineError: no answer, or no key, came within the spec's timeout.
        WeightSyncError: the store cannot be reached, its epoch is another one, it refused because a
            bound is exceeded, or there was a reason to stop.
    """

    def __init__(
        self, spec: TransferGroupSpec, phase: str, peers: str, stop_reason: StopReason
    ) -> None:
        super().__init__()
        self._member: dict[str, Any] = {"epoch": spec.epoch}
        self._prefix = f"{spec.group}/" if spec.group else ""
        self._metadata = ((KEY_METADATA, spec.store_key),)
        self._timeout_s = spec.timeout_s
        self._phase = phase
        self._peers = peers
        self._stop_reason = stop_reason
        self._name = f"store {join_host_port(spec.host, spec.port)}"
        self._clones: list[EpochStore] = []
        host = bare_host(spec.host)
        try:
            # Tries the addresses of a name in turn, such as IPv6 and IPv4; gRPC gets the one that
            # answers.
            with socket.create_connection((host, spec.port), spec.timeout_s) as probe:
                self.local_address: str = probe.getsockname()[0]
                address = str(probe.getpeername()[0])
        except OSError as error:
            raise WeightSyncError(self._name, phase, f"cannot connect: {error}") from error
        self._channel = member_channel(join_host_port(address, spec.port), host, spec.certificates)
        self._calls = services.RendezvousServiceStub(self._channel)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        request = messages.PutKeyRequest(
            **self._member, key=self._prefix + key, value=_as_bytes(value)
        )
        self._call(self._calls.PutKey, request)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        return self.await_keys([key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self.await_keys(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self.existing(keys).keys() >= set(keys)

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 if missing; return the sum."""
        request = messages.AddToKeyRequest(**self._member, key=self._prefix + key, amount=value)
        return self._call(self._calls.AddToKey, request).sum

    def compare_set(  # torch passes bytes where its stubs declare str
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Write a key if it has the expected value, or is missing and the expected value is empty.

        Returns:
            its value afterwards; the expected value if the key is still missing.
        """
        request = messages.PutKeyRequest(
            **self._member,
            key=self._prefix + key,
            value=_as_bytes(desired_value),
            expected=_as_bytes(expected_value),
        )
        return self._call(self._calls.PutKey, request).value

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        request = messages.PutKeyRequest(**self._member, key=self._prefix + key)
        return self._call(self._calls.PutKey, request).HasField("value")

    # Torch's C++ looks this one method up by its C++ name.
    deleteKey = delete_key

    def clone(self) -> EpochStore:
        """Return the same keys over the same connection, for another thread of torch."""
        clone = EpochStore.__new__(EpochStore)
        Store.__init__(clone)
        vars(clone).update(vars(self), _clones=[])
        self._clones.append(clone)
        return clone

    def existing(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Return the values of those keys that are there."""
        prefixed = [self._prefix + key for key in keys]
        values = self._call(
            self._calls.GetKeys, messages.GetKeysRequest(**self._member, keys=prefixed)
        ).values
        return {key: values[k] for key, k in zip(keys, prefixed, strict=True) if k in values}

    def await_keys(
        self,
        keys: Sequence[str],
        timeout_s: float,
        owners: Callable[[Sequence[int]], str] | None = None,
    ) -> list[bytes]:
        """Wait until all keys are there; return their values.

        Args:
            timeout_s: seconds from this call on.
            owners: names the members that did not write the keys of these indexes; by default all
                peers.
        """
        deadline = time.monotonic() + timeout_s
        pause = _POLL_MIN_S
        while True:
            values = self.existing(keys)
            missing = [index for index, key in enumerate(keys) if key not in values]
            if not missing:
                return [values[key] for key in keys]
            absent = owners(missing) if owners else self._peers
            if reason := self._stop_reason():
                raise WeightSyncError(absent, self._phase, f"{reason}, before joining")
            if time.monotonic() > deadline:
                remedy = "probe it, and form a new epoch without it"
                raise DeadlineError(absent, self._phase, timeout_s, remedy)
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MAX_S)

    def _call(self, method: Callable[..., _AnswerT], request: _RequestT) -> _AnswerT:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            detail = error.details() or code.name
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineError(self._name, self._phase, self._timeout_s) from error
            if code is grpc.StatusCode.UNAVAILABLE:
                detail = f"cannot connect: {detail}"
            raise WeightSyncError(self._name, self._phase, detail) from error


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _message_limits(max_bytes: int) -> tuple[tuple[str, int], ...]:
    names = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    return tuple((name, max_bytes) for name in names)


def member_channel(
    target: str,
    host: str,
    certificates: TransferCertificates | None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Channel:
    """Open a separate connection to an address.

    Args:
        host: the name that the address stands for.
    """
    options = (*_message_limits(max_bytes), *_CHANNEL_OPTIONS)
    if certificates is None:
        return grpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(
        certificates.authority, certificates.key, certificates.certificate
    )
    # The target is an address; the certificate names the host.
    name = ("grpc.ssl_target_name_override", certificates.server_name or host)
    return grpc.secure_channel(target, credentials, options=(*options, name))


def gather(store: EpochStore, spec: TransferGroupSpec, names: Mapping[int, str]) -> None:
    """Announce this rank and wait until all ranks have done so.

    Torch's constructors would report only *that* a member is missing; this reports which one, and
    leaves almost no wait to them.

    Args:
        names: the names of all ranks, for the error.

    Raises:
        DeadlineError: ranks did not arrive within the spec's timeout; the error names them.
        WeightSyncError: there was a reason to stop, or the store refused.
    """
    keys = [f"joined/{rank}" for rank in range(spec.world_size)]
    store.set(keys[spec.rank], b"1")
    store.await_keys(keys, spec.timeout_s, lambda ranks: ", ".join(names[rank] for rank in ranks))
