"""The transfer group of one epoch: formed once, used until its first failure, never repaired.

Input: a `TransferGroupSpec`; then buckets, in the order of the plan, the same on all ranks. It
waits for all members (formation), then for each collective, in short repeated waits, which
completion, the spec's timeout, the caller's stop event or `abandon` end. After a failure the group
is abandoned. Its owner thread destroys it, which may take as long as the pending operation's
timeout; meanwhile that operation may still read and write its buffers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sluice.concurrency.threads import OwnerThread, StopReason
from sluice.device.protocol import Device
from sluice.errors import NotReadyError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.backend import (
    Membership,
    ProcessGroup,
    Work,
    create_process_group,
    wait_briefly,
)
from sluice.weights.rendezvous import EpochStore, gather

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

SENDER_NAME = "trainer"
"""Rank 0 in errors."""

_GRACE_S = 1.0


class TransferGroup:
    """One epoch's process group; rank 0 sends.

    Any thread may call `form`, `run` and `abandon`. Only a call that `run` executes, in the group's
    owner thread, may call `post` and `wait_for`.

    Args:
        spec: the epoch and this member's rank.
        names: the names of all ranks, for errors.
    """

    def __init__(self, spec: TransferGroupSpec, names: Mapping[int, str], device: Device) -> None:
        self.spec = spec
        self.device = device
        self._names = names
        self._owner = OwnerThread(f"weights-epoch-{spec.epoch}")
        self._lock = threading.Lock()
        self._process_group: ProcessGroup | None = None
        self._store: EpochStore | None = None
        self._abandoned: str | None = None

    @property
    def peers(self) -> str:
        """Return the other members, for errors: a failed collective names no member."""
        peers = [name for rank, name in sorted(self._names.items()) if rank != self.spec.rank]
        return ", ".join(peers)

    def form(self, should_stop: threading.Event) -> None:
        """Join the other members; block up to the spec's timeout.

        Raises:
            DeadlineError: members did not arrive; the error names them.
            WeightSyncError: the formation failed or was stopped.
        """
        phase = f"forming the transfer group of epoch {self.spec.epoch}"
        self.run(
            lambda: self._construct(phase, self._stop_reason(should_stop)),
            phase,
            self.spec.timeout_s,
            should_stop,
        )

    def run(
        self,
        call: Callable[[], _T],
        phase: str,
        timeout_s: float,
        should_stop: threading.Event,
    ) -> _T:
        """Run `call` in the owner thread; if it fails in any way, abandon the group.

        Raises:
            NotReadyError: the group was abandoned before.
            DeadlineError: `call` did not end within `timeout_s` (and a grace of a second).
            WeightSyncError: see `wait_for`; also when `should_stop` is set.
        """
        if self._abandoned is not None:
            raise NotReadyError(
                f"the transfer group of epoch {self.spec.epoch} was abandoned "
                f"({self._abandoned}); form a new epoch"
            )
        try:
            return self._owner.run(
                call,
                timeout_s=timeout_s + _GRACE_S,
                stop_reason=self._stop_reason(should_stop),
                peer=self.peers,
                phase=phase,
            )
        except BaseException as error:  # however the wait ends, the collective may still run
            self.abandon(f"{type(error).__name__} while {phase}")
            raise

    def post(self, wire: torch.Tensor) -> Work:
        """Start the broadcast of one bucket, uint8 on the group's device; do not wait for it."""
        if self._process_group is None:
            raise NotReadyError(f"the transfer group of epoch {self.spec.epoch} is not formed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.spec.timeout_s)
        try:
            return self._process_group.broadcast([wire], options)
        except RuntimeError as error:
            raise WeightSyncError(self.peers, "starting a collective", _summarize(error)) from error

    def wait_for(self, work: Work, phase: str, item: str, should_stop: threading.Event) -> None:
        """Wait until a started broadcast has ended.

        Raises:
            WeightSyncError: it failed, made no progress within the timeout, or was stopped.
                Names the peers (any of them may be the cause) and the bucket.
        """
        deadline = time.monotonic() + self.spec.timeout_s + _GRACE_S / 2
        stop_reason = self._stop_reason(should_stop)
        # One long wait of torch could not be stopped, so this takes many short ones.
        while not work.is_completed():
            if reason := stop_reason():
                raise WeightSyncError(self.peers, phase, f"{reason}, at {item}")
            if time.monotonic() > deadline:
                detail = f"{item} did not end within {self.spec.timeout_s:g} s"
                raise WeightSyncError(self.peers, phase, detail)
            wait_briefly(work, self.spec.backend)
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightSyncError(self.peers, phase, f"{item}: {_summarize(error)}") from error

    def abandon(self, reason: str) -> None:
        """Give the group up and return at once; repeating it is harmless.

        A call in progress fails soon after. The owner thread destroys the group.
        """
        with self._lock:
            if self._abandoned is not None:
                return
            self._abandoned = reason
        _log.info("weights: leaving epoch %d: %s", self.spec.epoch, reason)
        self._owner.retire(self._dispose, within_s=2 * self.spec.timeout_s + _GRACE_S)

    def _stop_reason(self, should_stop: threading.Event) -> StopReason:
        return lambda: (
            self._abandoned or ("stopped by the caller" if should_stop.is_set() else None)
        )

    def _construct(self, phase: str, stop_reason: StopReason) -> None:
        spec = self.spec
        # Otherwise every bucket would wait for the kernels of the concurrent training step.
        self.device.use_own_stream()
        self._store = EpochStore(spec, phase, self.peers, stop_reason)
        gather(self._store, spec, self._names)
        try:
            self._process_group = create_process_group(
                spec.backend,
                Membership(
                    store=self._store,
                    rank=spec.rank,
                    world_size=spec.world_size,
                    timeout_s=spec.timeout_s,
                    local_address=self._store.local_address,
                    device=self.device.torch_device,
                    bucket_bytes=spec.bucket_bytes,
                ),
            )
        except RuntimeError as error:
            raise WeightSyncError(self.peers, phase, _summarize(error)) from error

    def _dispose(self) -> None:
        group, self._process_group = self._process_group, None
        if group is not None and self.spec.backend != "gloo":
            # A device kernel that waits for a lost peer spins forever unless it is aborted.
            group.abort()
        del group  # its threads may use the store until they are gone
        self._store = None


def run_concurrently(calls: Sequence[Callable[[], _T]], give_up: Callable[[], None]) -> list[_T]:
    """Make calls concurrently; if one fails, call `give_up` and raise its error.

    Args:
        calls: for example one for each group of an epoch.
        give_up: must make the other calls end soon.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="weights-group") as threads:
        running = [threads.submit(call) for call in calls]
        ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        failed = [call for call in running if call in ended and call.exception() is not None]
        if failed:  # the others' collectives must not wait until their deadlines
            give_up()
            failed[0].result()
    return [call.result() for call in running]


def rank_name(rank: int) -> str:
    """Return the name of a trainer rank in errors, where several send."""
    return f"trainer rank {rank}"


def _summarize(error: RuntimeError) -> str:
    """Return the first line of torch's message, without its leading source location, and the line
    in which NCCL says what was wrong.
    """
    line, _, details = str(error).strip().partition("\n")
    location, bracket, text = line.partition("] ")
    place = text if bracket and location.startswith("[/") else line
    reason = details.partition("Last error:\n")[2].strip().partition("\n")[0]
    return f"{place}: {reason}" if reason else place
