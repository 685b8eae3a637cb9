"""Hold kept groups and choose those of the next train batch.

State without a clock or I/O; `pipeline` drives it. A kept group leaves in one of two ways: in an
acknowledged batch, or because it grew too stale. Being surplus is no reason to leave, but for the
sampling strategy ``rounds``, which removes what a batch did not take (`train_batches`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from sluice.algorithm.groups.staleness import GroupAges, OnStale
from sluice.errors import NotFoundError
from sluice.types import DataProgress, GradedGroup, Scored, TrainBatch, TrainGroup

ACKNOWLEDGED_REMEMBERED = 64
"""Acknowledged batches whose acknowledgement may be repeated: a trainer repeats its last one only,
while it cannot reach the service."""


@dataclass(frozen=True, slots=True)
class BatchRules:
    """B, S, and what happens to groups that would grow stale."""

    batch_size: int
    max_staleness: int
    on_stale: OnStale


@dataclass(frozen=True, slots=True)
class Lease:
    """A batch at the trainer."""

    batch: TrainBatch
    groups: tuple[GradedGroup, ...]


class Batcher:
    """Kept groups and the one lease.

    `ages` knows how old they are, and the running groups, of which others tell it; ask it what to
    do with them.

    Args:
        rules: batch size and staleness.
    """

    def __init__(self, rules: BatchRules) -> None:
        self._rules = rules
        self.ages = GroupAges(rules.batch_size, rules.max_staleness, rules.on_stale)
        self._kept: dict[str, GradedGroup] = {}
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_REMEMBERED)
        self._unpublished: list[int] = []  # versions that leases were formed under
        self.lease: Lease | None = None

    @property
    def num_kept(self) -> int:
        """Kept groups that wait for a batch."""
        return len(self._kept)

    @property
    def num_in_training(self) -> int:
        """Groups leased under a version whose successor is not announced yet."""
        return len(self._unpublished) * self._rules.batch_size

    def keep(self, graded: GradedGroup) -> None:
        """Take on a kept group."""
        prompt = graded.group.prompt
        self._kept[prompt.prompt_id] = graded
        self.ages.keep(prompt.prompt_id, graded.oldest_version, prompt.sequence)

    def kept_groups(self, prompt_ids: Sequence[str]) -> tuple[GradedGroup, ...]:
        """Kept groups by their prompts' ids."""
        return tuple(self._kept[prompt_id] for prompt_id in prompt_ids)

    def all_kept(self) -> tuple[GradedGroup, ...]:
        """Every kept group that waits."""
        return tuple(self._kept.values())

    def remove(self, prompt_id: str) -> GradedGroup:
        """Give up a kept group (grown stale, or surplus where nothing is carried over)."""
        self.ages.remove(prompt_id)
        return self._kept.pop(prompt_id)

    def form(
        self,
        chosen: Sequence[GradedGroup],
        *,
        version: int,
        progress: DataProgress,
        statistics: Callable[[Sequence[TrainGroup]], Mapping[str, float]],
    ) -> TrainBatch:
        """Lease the chosen groups to the trainer.

        Args:
            chosen: groups of a decision.
            version: the version the batch will update.
            progress: the data set once the batch is trained.
            statistics: metrics of the batch.
        """
        for graded in chosen:
            self.remove(graded.group.prompt.prompt_id)
        groups = tuple(train_group(graded) for graded in chosen)
        batch = TrainBatch(uuid4().hex, version, groups, progress, statistics(groups))
        self.lease = Lease(batch, tuple(chosen))
        self._unpublished.append(version)
        return batch

    def leased(self, batch_id: str) -> TrainBatch:
        """The batch at the trainer.

        Raises:
            NotFoundError: it is another one, or none.
        """
        if self.lease is None or self.lease.batch.batch_id != batch_id:
            raise _not_leased(batch_id)
        return self.lease.batch

    def acknowledge(self, batch_id: str) -> Lease | None:
        """Close the lease; ``None`` if it was closed before.

        Raises:
            NotFoundError: no such lease, nor among the last `ACKNOWLEDGED_REMEMBERED`.
        """
        if batch_id in self._acknowledged:
            return None
        self.leased(batch_id)
        lease, self.lease = self.lease, None
        self._acknowledged.append(batch_id)
        return lease

    def next_version(self, announced: int) -> int:
        """The version of the next batch to be formed while `announced` is."""
        if not self._unpublished:
            return announced
        return max(announced, max(self._unpublished) + 1)

    def published(self, version: int) -> None:
        """A version was announced: groups leased under older ones no longer count."""
        self._unpublished = [leased for leased in self._unpublished if leased >= version]

    def recovered(self, version: int) -> None:
        """An earlier service leased a batch under this version: its trainer may be at it."""
        self._unpublished.append(version)

    def not_in_training(self, version: int) -> None:
        """That batch never arrived; harmless if its version was published meanwhile."""
        if version in self._unpublished:
            self._unpublished.remove(version)

    def take_back_lease(self) -> tuple[GradedGroup, ...]:
        """Return the leased groups to the kept ones: the trainer asks anew."""
        if self.lease is None:
            return ()
        groups, version = self.lease.groups, self.lease.batch.policy_version
        self.lease = None
        if version in self._unpublished:
            self._unpublished.remove(version)
        for graded in groups:
            self.keep(graded)
        return groups

    def clear(self) -> None:
        """Forget every group and the lease: another trainer begins."""
        self._kept.clear()
        self.ages.remove_all()
        self.lease = None
        self._unpublished.clear()


def _not_leased(batch_id: str) -> NotFoundError:
    return NotFoundError(
        f"batch '{batch_id}' is not leased (it was taken back, or never existed); take the next "
        "batch"
    )


def train_group(graded: GradedGroup) -> TrainGroup:
    """The scored samples of a graded group, as the optimizer sees them."""
    pairs = [
        (rollout, outcome)
        for rollout, outcome in zip(graded.group.rollouts, graded.outcomes, strict=True)
        if isinstance(outcome, Scored)
    ]
    return TrainGroup(
        prompt_id=graded.group.prompt.prompt_id,
        prompt_token_ids=graded.group.prompt_token_ids,
        rollouts=tuple(rollout for rollout, _ in pairs),
        scores=tuple(scored for _, scored in pairs),
        data_source=graded.group.prompt.data_source,
        baseline_reward=graded.baseline_reward,
        images=graded.group.prompt.images,
    )
