"""Members at a rendezvous store, without a process group."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.concurrency.threads import StopReason
from sluice.types import TransferGroupSpec
from sluice.weights.rendezvous import EpochStore, RendezvousStore

KEY = bytes(range(32))


def make_spec(
    port: int,
    *,
    epoch: int = 1,
    rank: int = 0,
    world_size: int = 2,
    host: str = "127.0.0.1",
    timeout_s: float = 60.0,
    store_key: bytes = KEY,
) -> TransferGroupSpec:
    return TransferGroupSpec(
        epoch=epoch,
        host=host,
        port=port,
        rank=rank,
        world_size=world_size,
        backend="gloo",
        bucket_bytes=4096,
        timeout_s=timeout_s,
        tensors=(),
        plan_digest="",
        store_key=store_key,
    )


def link_to(
    store: RendezvousStore,
    *,
    epoch: int = 1,
    timeout_s: float = 60.0,
    stop_reason: StopReason = lambda: None,
    store_key: bytes = KEY,
) -> EpochStore:
    spec = make_spec(
        store.port, epoch=epoch, host=store.host, timeout_s=timeout_s, store_key=store_key
    )
    return EpochStore(spec, "forming epoch 1", "rollout-0", stop_reason)


def give_calls_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a member's timeout end its waits for others alone: the store answers when it can."""
    call = EpochStore._call

    def patient(store: EpochStore, method: Any, request: Any) -> Any:
        one = EpochStore.__new__(EpochStore)
        vars(one).update(vars(store), _timeout_s=60.0)
        return call(one, method, request)

    monkeypatch.setattr(EpochStore, "_call", patient)
