"""What the dispatcher is asked for, and how it calls replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.reward.group_allowance import GroupBudget
from services.reward.received_samples import ReceivedSamples
from services.reward.replica_queue import Priority
from sluice.algorithm.growing_sample import NewTokens
from sluice.errors import SluiceError
from sluice.types import (
    FailureKind,
    Prompt,
    ReplicaInfo,
    Rollout,
    SamplingParams,
    TokenIds,
)

PHASE = "generating"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Samples of one prompt to draw, on replicas of `lowest_version` up to `highest_version`.

    A sample is the same whichever others are asked for with it: its randomness depends on the
    seed and its index alone. So a group may be drawn in parts, each by a request of its own; the
    parts share `allowance`, by which the whole group is bounded.

    With `goes_without` the samples that no replica could generate are left out, unless none is
    left. `received` is what an earlier service had of the samples; with `is_saved` the next one is
    to have what this one gets.
    """

    prompt: Prompt
    sample_indexes: tuple[int, ...]
    sampling: SamplingParams
    priority: Priority
    lowest_version: int
    highest_version: int | None = None
    budget: GroupBudget = field(default_factory=GroupBudget, compare=False, repr=False)
    allows_missing: bool = False
    received: ReceivedSamples | None = field(default=None, compare=False, repr=False)
    is_saved: bool = False

    def __post_init__(self) -> None:
        indexes = self.sample_indexes
        if not indexes or len(set(indexes)) != len(indexes) or min(indexes) < 0:
            raise ValueError(f"sample_indexes: {indexes} are not one or more different indexes")

    @property
    def num_samples(self) -> int:
        """Samples asked for."""
        return len(self.sample_indexes)

    def accepts(self, version: int) -> bool:
        """Whether tokens of `version` will do."""
        below = self.highest_version is None or version <= self.highest_version
        return below and version >= self.lowest_version


def first_samples(count: int) -> tuple[int, ...]:
    """The indexes of a prompt's first `count` samples."""
    return tuple(range(count))


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """Something a replica sent.

    Attributes:
        started: the prompt's tokens, and the version that starts; in the first event only.
        rollouts: samples that ended, each with all of its tokens.
        deltas: new tokens of samples that have not ended.
        engine_tokens: tokens that the replica's engine has drawn for whomever, when none came of
            these samples for some time and samples wait for a slot there.
    """

    started: tuple[TokenIds, int] | None
    rollouts: tuple[Rollout, ...]
    deltas: tuple[NewTokens, ...] = ()
    engine_tokens: int | None = None


class GenerationClient(Protocol):
    """How replicas are called."""

    def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream samples, of which `partials` are continued.

        `SluiceError` on failure, `InvalidRequestError` if refused for good.
        """
        ...

    async def retain(self, addresses: Collection[str]) -> None:
        """Forget replicas at all other addresses."""
        ...


class GroupFailedError(SluiceError):
    """A group cannot be generated: refused by the engine, or failed too often.

    Args:
        message: what happened.
        kind: that of all its samples, where it is known.
    """

    def __init__(self, message: str, kind: FailureKind | None = None) -> None:
        super().__init__(message)
        self.kind = kind


class OverlongPromptError(GroupFailedError):
    """A prompt is over data.max_prompt_length, and such prompts are left out."""


StartCallback = Callable[[int | None], None]
SampleCallback = Callable[[Rollout], None]
