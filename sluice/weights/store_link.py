"""A member's questions to the rendezvous store.

Waits for: the store's answers; for keys by asking again and again, so that nothing is held open
and nobody is in anybody's way.
Unblocked by: answers, deadlines, and a reason to stop.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence

from sluice.config.host_port import bare_host, join_host_port
from sluice.errors import DeadlineError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.owner_thread import StopReason
from sluice.weights.store_messages import (
    MAX_FRAME_BYTES,
    Action,
    Answer,
    Question,
    Read,
    from_body,
    to_body,
)
from sluice.weights.store_seal import (
    FRAME_HEADER,
    NONCE_BYTES,
    Conversation,
    FrameKind,
    signed_length,
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
            question = to_body(Question(self._epoch, action))
            with self._connect() as connection:
                answer = from_body(self._exchange(connection, question), Answer)
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
