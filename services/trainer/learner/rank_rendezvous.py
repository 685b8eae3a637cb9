"""A trainer rank's place, and the store where all ranks meet.

Torch's own store (``env://``) looks up the name of each address that connects; a lost answer of
the name server costs 5 s. The store of the weight transfers does no look-ups. Rank 0 opens it
at MASTER_ADDR:MASTER_PORT, for one epoch, until the ranks end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sluice.config.addresses import join_host_port, split_host_port
from sluice.errors import ConfigError, DeadlineError, PeerError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.rendezvous import EpochStore, RendezvousStore, gather

FORMING = "forming the trainer ranks' process group"
LATE_REMEDY = (
    "see the other ranks' logs; raise sluice.trainer.command_timeout_s if one of them was only slow"
)
_EPOCH = 0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class RankAddress:
    """This process's rank, and the address of rank 0's store."""

    rank: int
    world_size: int
    host: str
    port: int

    @property
    def store_name(self) -> str:
        """Return the store's name for errors."""
        return f"trainer rank 0 at {join_host_port(self.host, self.port)}"


class RankRendezvous:
    """A store that all ranks have reached. Keep it as long as their group exists.

    Args:
        timeout_s: seconds until all ranks must have arrived; also the limit of torch's later waits.

    Raises:
        ConfigError: rank 0 cannot listen at its address.
        DeadlineError: rank 0 or other ranks did not arrive; the error names them.
        PeerError: the store refused a request, or its connection was lost.
    """

    def __init__(self, place: RankAddress, timeout_s: float) -> None:
        self._server = RendezvousStore(place.host, place.port) if place.rank == 0 else None
        try:
            if self._server is not None:
                self._server.begin(_EPOCH)
            self.store = _join_store(place, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close rank 0's store; the group must have ended."""
        if self._server is not None:
            self._server.close()


def rank_place(environment: Mapping[str, str]) -> RankAddress:
    """Return the place from torchrun's variables.

    Raises:
        ConfigError: a variable is missing or invalid; names it.
    """
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank >= world_size:
        raise _environment_error(f"RANK = {rank} is not below WORLD_SIZE = {world_size}")
    port = _number(environment, "MASTER_PORT")
    if not 0 < port <= 65535:
        raise _environment_error(f"MASTER_PORT = {port} is not in 1..65535")
    host = split_host_port(_variable(environment, "MASTER_ADDR"))[0]
    return RankAddress(rank, world_size, host, port)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _variable(environment, name)
    if not (text.isascii() and text.isdigit()):
        raise _environment_error(f"{name} = {text!r} is not a number")
    return int(text)


def _variable(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise _environment_error(f"{name} is not set")
    return environment[name]


def _environment_error(why: str) -> ConfigError:
    return ConfigError(
        f"several trainer ranks need torchrun's environment, and {why}; start them with torchrun "
        "or sluice up"
    )


def _join_store(place: RankAddress, timeout_s: float) -> EpochStore:
    """Reach the store and wait there for all ranks."""
    spec = TransferGroupSpec(
        epoch=_EPOCH,
        host=place.host,
        port=place.port,
        rank=place.rank,
        world_size=place.world_size,
        backend="",
        bucket_bytes=0,
        timeout_s=timeout_s,
        tensors=(),
        plan_digest="",
    )
    store = _reach_store(spec, place)
    try:
        gather(store, spec, {rank: f"trainer rank {rank}" for rank in range(place.world_size)})
    except DeadlineError as error:
        raise DeadlineError(error.peer, FORMING, timeout_s, LATE_REMEDY) from error
    except WeightSyncError as error:
        raise PeerError(place.store_name, FORMING, error.detail) from error
    return store


def _reach_store(spec: TransferGroupSpec, place: RankAddress) -> EpochStore:
    """Retry until the store answers, since rank 0 may start later than the others.

    Torch needs the store before this process has an event loop, so `sluice.rpc.retries` cannot wait
    here.
    """
    ends_s = time.monotonic() + spec.timeout_s
    while True:
        try:
            store = EpochStore(spec, FORMING, "another trainer rank", lambda: None)
            store.existing(())
        except (DeadlineError, WeightSyncError) as error:
            if time.monotonic() > ends_s:
                why = f"{error}; {LATE_REMEDY}"
                raise DeadlineError(place.store_name, FORMING, spec.timeout_s, why) from error
        else:
            return store
        time.sleep(_RETRY_S)
