"""An update that carries only the changes since a version that the receivers hold.

Receivers apply it to the base in staging memory, or to a copy of it there. Its digest covers all
parts, as for an update that is sent whole.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sluice.errors import InvalidRequestError, WeightSyncError
from sluice.weights.delta import apply_change, encode_change, max_code_bytes
from sluice.weights.plan import Bucket, PackedShare, TransferPlan, WeightBuffer, stream_of
from sluice.weights.transfer import IN_FLIGHT, Base

WORTHWHILE_SHARE = 0.25
"""Largest share of all bytes. Above it, coding takes longer than a fast network needs for the
difference."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpdate:
    """The changes of each bucket since `base`: uint8 on the CPU, in the order of the plan."""

    base: Base
    codes: tuple[torch.Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each bucket's changes."""
        return tuple(code.numel() for code in self.codes)


def encode_update(
    plan: TransferPlan,
    base: Base,
    old: WeightBuffer,
    new: WeightBuffer,
    should_stop: threading.Event,
) -> SparseUpdate | None:
    """Return the changes from `old` to `new`; ``None`` if they are too many, or when asked to stop.

    Memory: the code, which is at most about `WORTHWHILE_SHARE` of the share.

    Args:
        plan: of the wire; both buffers hold its parts.
        base: version and digest of `old`.
        old: the weights that every receiver holds.
        new: the weights that they will hold.
        should_stop: checked between two buckets.
    """
    if old.plan != new.plan or not {*plan.tensors} <= {*new.plan.tensors}:
        raise InvalidRequestError("weights: only buffers of the epoch's tensors can be compared")
    allowed = WORTHWHILE_SHARE * plan.total_bytes
    codes: list[torch.Tensor] = []
    before, after = stream_of(plan, old, 1), stream_of(plan, new, 1)
    for bucket in plan.buckets:
        contents = before.bucket(bucket).numpy(), after.bucket(bucket).numpy()
        code = encode_change(plan, bucket, *contents)
        # Stop as soon as the changes are not worth it.
        allowed -= code.nbytes
        if allowed < 0 or should_stop.is_set():
            return None
        codes.append(torch.from_numpy(code))
    return SparseUpdate(base, tuple(codes))


class ChangeSendingPort:
    """The sender's port for changes; the digest covers the new weights."""

    def __init__(
        self, update: SparseUpdate, new: WeightBuffer | PackedShare, device: torch.device
    ) -> None:
        self._update = update
        self._new = new
        self._device = device

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._update.codes[bucket.index].to(self._device)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        return self._new.bucket(bucket)


class ChangeReceivingPort:
    """The receiver's port for changes, which it applies to the base in staging memory.

    Args:
        plan: of the wire.
        staging: memory for the new weights.
        base: the same parts of the base; only read, unless it is the staging memory itself.
        sizes: bytes of each bucket's changes.
        sender: sends them, for errors.
        phase: for errors.

    Raises:
        ValueError: no changes under this plan have these sizes.
    """

    def __init__(
        self,
        plan: TransferPlan,
        staging: WeightBuffer | PackedShare,
        base: WeightBuffer | PackedShare,
        sizes: Sequence[int],
        device: torch.device,
        sender: str,
        phase: str,
    ) -> None:
        for bucket, size in zip(plan.buckets, sizes, strict=True):
            if not 0 < size <= max_code_bytes(plan, bucket):
                raise ValueError(f"bucket {bucket.index + 1} claims changes of {size} bytes")
        self._plan = plan
        self._staging = staging
        self._base = base
        self._sizes = tuple(sizes)
        self._peer = sender, phase
        longest = max(sizes, default=0)
        self._ring = [
            torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)
        ]

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._ring[bucket.index % IN_FLIGHT][: self._sizes[bucket.index]]

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """Apply the changes; return the bucket's new bytes.

        Raises:
            WeightSyncError: the bytes that arrived are not changes of this bucket.
        """
        content = self._old(bucket)
        try:
            apply_change(self._plan, bucket, wire.cpu().numpy(), content.numpy())
        except ValueError as error:
            item = f"bucket {bucket.index + 1} of {len(self._plan.buckets)}"
            raise WeightSyncError(*self._peer, f"{item}: {error}") from error
        return self._staging.put(bucket, content)

    def _old(self, bucket: Bucket) -> torch.Tensor:
        """Return the bucket of the base, to be written to."""
        if self._base is self._staging or isinstance(self._base, PackedShare):
            return self._base.bucket(bucket)  # packed: a copy that nothing else reads
        return self._staging.bucket(bucket).copy_(self._base.bucket(bucket))
