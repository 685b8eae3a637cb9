"""New weights inside vLLM's worker: received in a thread, proven, then handed to the model.

Consumes: calls of the worker's own loop, none of which blocks. Produces: what became of the last
one, for whoever asks, and staged tensors.
Waits for: the transfer group, in a thread of its own.
Unblocked by: completion, the epoch's timeout, `abort`, another `join`.
On failure: the answer to `outcome` says so, the model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from sluice.device.protocol import Device
from sluice.errors import SluiceError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.receiver import StagedWeights, WeightReceiver

__all__ = ["WorkerStaging", "rank_in_group"]

Outcome = dict[str, object]
_SENDER = "trainer"


def rank_in_group(spec: TransferGroupSpec, worker_rank: int) -> TransferGroupSpec:
    """The spec of one of a replica's workers: they take consecutive ranks from the replica's.

    Raises:
        WeightSyncError: the group has no rank for it.
    """
    if worker_rank >= spec.ranks:
        raise WeightSyncError(
            _SENDER,
            f"joining epoch {spec.epoch}",
            f"the group has {spec.ranks} rank(s) for this replica and none for its worker "
            f"{worker_rank}; run the same version of sluice on both ends",
        )
    return replace(spec, rank=spec.rank + worker_rank, ranks=1)


class WorkerStaging:
    """One worker's membership in transfer groups.

    Args:
        device: of the wire.
        shapes: of the weights the model has, by checkpoint name.
    """

    def __init__(self, device: Device, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._receiver = WeightReceiver(device, shapes)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-staging")
        self._job: Future[Outcome] | None = None
        self._staged: StagedWeights | None = None

    def join(self, spec: TransferGroupSpec) -> None:
        """Begins to join an epoch, leaving any earlier one; the outcome holds `plan_digest`."""
        self.abort(f"epoch {spec.epoch} begins")
        self._begin(lambda: {"plan_digest": self._receiver.join(spec)})

    def stage(self, version: int) -> None:
        """Begins to receive; the outcome holds version, digest, received_bytes and seconds."""
        self._staged = None
        self._begin(lambda: self._stage(version))

    def _stage(self, version: int) -> Outcome:
        staged = self._receiver.stage(version)
        self._staged = staged
        return {
            "version": staged.version,
            "digest": staged.digest,
            "received_bytes": staged.received_bytes,
            "seconds": staged.seconds,
        }

    def _begin(self, call: Callable[[], Outcome]) -> None:
        self._job = self._thread.submit(call)

    def outcome(self) -> Outcome | None:
        """How the last call ended; ``None`` while it runs.

        Either what the call promises, or `error`: the sentence, and `kind`: the class.
        """
        job = self._job
        if job is None:
            return {"error": "nothing was begun", "kind": WeightSyncError.__name__}
        if not job.done():
            return None
        try:
            return job.result()
        except SluiceError as error:
            return {"error": str(error), "kind": type(error).__name__}
        except Exception as error:  # noqa: BLE001 - crosses a process: whoever asks gets it
            return {"error": repr(error), "kind": WeightSyncError.__name__}

    def staged(self, version: int, digest: str) -> StagedWeights:
        """What was staged under that version and digest.

        Raises:
            WeightSyncError: something else was, or nothing.
        """
        staged, phase = self._staged, f"committing version {version}"
        if staged is None or staged.version != version:
            found = "nothing" if staged is None else f"version {staged.version}"
            raise WeightSyncError(_SENDER, phase, f"{found} is staged here; stage it first")
        if staged.digest != digest:
            raise WeightSyncError(
                _SENDER,
                phase,
                f"the digest of what is staged here is {staged.digest}, not {digest}",
            )
        return staged

    def release(self, staged: StagedWeights) -> None:
        """Gives staging memory back once the model has a copy of it."""
        self._staged = None
        self._receiver.keep(staged)

    def abort(self, reason: str) -> None:
        """Throws away what is staged and leaves the epoch, if any; returns at once."""
        self._staged = None
        self._receiver.abort(reason)

    def close(self) -> None:
        """Leaves the group and lets the thread end."""
        self._receiver.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
