"""An update as what changed since a version that the receivers hold: coded, and on the wire.

What arrives is applied to a copy of the base in staging memory; the digest is that of all weights,
as for an update that is sent whole.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sluice.errors import InvalidRequestError, WeightSyncError
from sluice.weights.delta import apply_change, encode_change, max_code_bytes
from sluice.weights.group import SENDER_NAME
from sluice.weights.plan import Bucket, TransferPlan, WeightBuffer
from sluice.weights.transfer import Base

WORTHWHILE_SHARE = 0.25
"""Of the bytes of all weights. Above it, coding takes longer than a fast network needs to carry the
difference."""

_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpdate:
    """The changes of each bucket since `base`: uint8 on the CPU, in the order of the plan."""

    base: Base
    codes: tuple[torch.Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each bucket's changes."""
        return tuple(code.numel() for code in self.codes)


def encode_update(
    plan: TransferPlan,
    base: Base,
    old: WeightBuffer,
    new: WeightBuffer,
    should_stop: threading.Event,
) -> SparseUpdate | None:
    """What changed from `old` to `new`; ``None`` if it is not worth it, or when asked to stop.

    Memory: the code, which is at most about `WORTHWHILE_SHARE` of the weights.

    Args:
        plan: of the wire; its tensors are those of both buffers, in their order.
        base: what `old` is.
        old: what every receiver holds.
        new: what they shall hold.
        should_stop: looked at between two buckets.
    """
    if not old.plan.tensors == new.plan.tensors == plan.tensors:
        raise InvalidRequestError("weights: only buffers of the epoch's tensors can be compared")
    allowed = WORTHWHILE_SHARE * plan.total_bytes
    codes: list[torch.Tensor] = []
    for bucket in plan.buckets:
        code = encode_change(plan, bucket, old.bucket(bucket).numpy(), new.bucket(bucket).numpy())
        allowed -= code.nbytes
        if allowed < 0 or should_stop.is_set():
            return None
        codes.append(torch.from_numpy(code))
    return SparseUpdate(base, tuple(codes))


class ChangeSendingPort:
    """Sends the changes; the digest is taken from the weights that they lead to."""

    def __init__(self, update: SparseUpdate, new: WeightBuffer, device: torch.device) -> None:
        self._update, self._new, self._device = update, new, device

    def load(self, bucket: Bucket) -> torch.Tensor:
        """The code of the bucket's changes."""
        return self._update.codes[bucket.index].to(self._device)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """The bucket's new bytes."""
        return self._new.bucket(bucket)


class ChangeReceivingPort:
    """Receives changes and applies each bucket's to a copy of the base in staging memory.

    Args:
        staging: where the new weights arise; its plan is that of the wire.
        base: of the same tensors; is only read.
        sizes: bytes of each bucket's changes.
        phase: for errors.

    Raises:
        ValueError: the sizes are not those of any changes under this plan.
    """

    def __init__(
        self,
        staging: WeightBuffer,
        base: WeightBuffer,
        sizes: Sequence[int],
        device: torch.device,
        phase: str,
    ) -> None:
        plan = staging.plan
        for bucket, size in zip(plan.buckets, sizes, strict=True):
            if not 0 < size <= max_code_bytes(plan, bucket):
                raise ValueError(f"bucket {bucket.index + 1} is said to change by {size} bytes")
        self._staging, self._base, self._sizes, self._phase = staging, base, tuple(sizes), phase
        longest = max(sizes, default=0)
        self._ring = [
            torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(_IN_FLIGHT)
        ]

    def load(self, bucket: Bucket) -> torch.Tensor:
        """Memory to receive the code into."""
        return self._ring[bucket.index % _IN_FLIGHT][: self._sizes[bucket.index]]

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        """The bucket's new bytes, in staging memory.

        Raises:
            WeightSyncError: what arrived are no changes of this bucket.
        """
        plan, content = self._staging.plan, self._staging.bucket(bucket)
        content.copy_(self._base.bucket(bucket))
        try:
            apply_change(plan, bucket, wire.cpu().numpy(), content.numpy())
        except ValueError as error:
            item = f"bucket {bucket.index + 1} of {len(plan.buckets)}"
            raise WeightSyncError(SENDER_NAME, self._phase, f"{item}: {error}") from error
        return content
