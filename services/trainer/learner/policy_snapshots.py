"""This rank's snapshots of the policy's weights to send, and rank 0's connections to the other
sending ranks.

The first rank that holds a piece of a tensor keeps and sends it, so only the first of several
copies of the model is sent, and no rank gathers what others hold.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext

import torch
from torch import Tensor

from services.trainer.learner.learner import Learner
from services.trainer.learner.rank_rendezvous import rank_place
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sending_ranks import SendingRank, SendingRankClient
from services.trainer.learner.tensor_layouts import TensorLayouts, holds_all
from sluice.config.run import RunConfig
from sluice.device.select import transfer_device
from sluice.errors import PeerError
from sluice.rpc.credentials import service_credentials
from sluice.weight_share import Cut, Holding
from sluice.weights.plan import tensor_specs
from sluice.weights.rendezvous import KEY_BYTES
from sluice.weights.snapshot import SnapshotBuffers

_ADDRESS_CHARS = 64


def holdings_of(layouts: TensorLayouts) -> tuple[Holding, ...]:
    """Return the holding of each rank that sends, rank 0 first; empty if rank 0 holds all
    weights."""
    if holds_all(layouts, 0):
        return ()
    by_rank: dict[int, list[tuple[str, tuple[Cut, ...]]]] = {}
    for name, layout in layouts.items():
        for piece in layout.pieces:
            by_rank.setdefault(piece.holders[0], []).append((name, layout.cuts(piece)))
    return tuple(Holding(rank, tuple(by_rank[rank])) for rank in sorted(by_rank))


class PolicySnapshots:
    """This rank's snapshots of the policy.

    Args:
        wire_dtype: the dtype in which floating-point weights are sent.
        timeout_s: seconds that a freeze waits for a broadcast that still reads its buffer.

    Attributes:
        tensors: all weights, in the form in which they are sent.
        holdings: the holding of each rank that sends; empty if rank 0 holds all weights.
        number: index of this rank's holding; ``None`` if it sends nothing and has no snapshots.
    """

    def __init__(
        self, learner: Learner, rank: int, wire_dtype: torch.dtype, timeout_s: float
    ) -> None:
        self._learner, self._timeout_s = learner, timeout_s
        self.tensors = tensor_specs(learner.named_weights(), wire_dtype)
        self.holdings = holdings_of(learner.layouts)
        senders = [holding.rank for holding in self.holdings] or [0]
        self.number = senders.index(rank) if rank in senders else None
        self._buffers: SnapshotBuffers | None = None
        if self.number is not None:
            holding = self.holdings[self.number] if self.holdings else None
            self._buffers = SnapshotBuffers(
                self.tensors,
                learner.untrained_names,
                holding,
                beside=next(
                    (tensor.device for _, tensor in learner.named_weights() if tensor.is_cuda), None
                ),
            )

    @property
    def buffers(self) -> SnapshotBuffers:
        """Return the buffers of the snapshots, on a rank that sends."""
        assert self._buffers is not None
        return self._buffers

    def freeze(self, version: int, other_ranks: AbstractContextManager[None] | None = None) -> None:
        """Copy this rank's part of the current weights as `version`.

        Args:
            other_ranks: entered once the buffer is free; the version is readable only after it is
                left.

        Raises:
            DeadlineError: the buffer is still being read.
        """
        if self._buffers is not None:
            with closing(self._parts(other_ranks or nullcontext())) as parts:
                self._buffers.write(parts, version, self._timeout_s)

    def _parts(
        self, other_ranks: AbstractContextManager[None]
    ) -> Generator[tuple[str, Tensor], None, None]:
        # The buffers keep weights that never change.
        has_all = self.buffers.version is not None
        untrained = self._learner.untrained_names if has_all else frozenset()
        names = None
        if self.number is not None and self.holdings:
            names = [name for name, _ in self.holdings[self.number].parts]
        with other_ranks:
            yield from self._learner.parts(names, left_out=untrained)


def policy_snapshots(
    config: RunConfig, learner: Learner, parallel: ParallelContext
) -> PolicySnapshots:
    """Return this rank's snapshots, as configured."""
    wire_dtype = getattr(torch, config.actor_rollout_ref.rollout.dtype)
    return PolicySnapshots(learner, parallel.rank, wire_dtype, config.sluice.weights.timeout_s)


@contextmanager
def connected_ranks(
    config: RunConfig, snapshots: PolicySnapshots, parallel: ParallelContext
) -> Iterator[list[SendingRankClient]]:
    """Let the ranks above 0 that hold weights send them while the block runs. Collective.

    Yields:
        rank 0's calls to the others, in the order of their holdings; none on the other ranks.

    Raises:
        ConfigError: this rank cannot listen.
        DeadlineError, PeerError: a rank did not take part.
    """
    with ExitStack() as stack:
        if not snapshots.holdings:
            yield []
            return
        weights = config.sluice.weights
        credentials = service_credentials(config.sluice.security, config.sluice.trainer.endpoint)
        certificates = credentials.for_transfers()
        phase = "connecting the ranks that send weights"
        own_key = secrets.token_bytes(KEY_BYTES) if parallel.rank == 0 else None
        key = parallel.broadcast_bytes(own_key, phase)
        address, port = "", 0
        if parallel.rank and snapshots.number is not None:
            address = _own_address()
            server = SendingRank(
                snapshots.number,
                snapshots.holdings,
                snapshots.tensors,
                snapshots.buffers,
                device=transfer_device(config.trainer.device, weights.backend),
                timeout_s=weights.timeout_s,
                keeps_base=weights.delta == "auto",
                host=address,
                key=key,
                certificates=certificates,
            )
            stack.callback(server.close)
            port = server.port
        places = _exchange_addresses(address, port, parallel, phase)
        clients: list[SendingRankClient] = []
        if parallel.rank == 0:
            for holding in snapshots.holdings[1:]:
                client = SendingRankClient(holding.rank, *places[holding.rank], key, certificates)
                stack.callback(client.close)
                clients.append(client)
        yield clients


def _own_address() -> str:
    """Return the address of this machine through which it reaches rank 0."""
    place = rank_place(os.environ)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PeerError(place.store_name, "finding the way to it", str(error)) from error


def _exchange_addresses(
    address: str, port: int, parallel: ParallelContext, phase: str
) -> Sequence[tuple[str, int]]:
    """Return every rank's address. Ranks exchange numbers: those of its letters."""
    letters = [float(ord(letter)) for letter in address.ljust(_ADDRESS_CHARS)]
    gathered = parallel.all_gather([float(port), *letters], phase)
    return [("".join(chr(int(n)) for n in text).strip(), int(port)) for port, *text in gathered]
