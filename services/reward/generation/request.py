"""A request for samples of one prompt: its seed, the progress that all requests of a group share,
the events that a replica sends, and the errors that end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeVar

from sluice.algorithm.groups.stragglers import StragglerRules
from sluice.algorithm.growing_sample import NewTokens
from sluice.algorithm.routing import ReplicaRequirement
from sluice.errors import SluiceError, leaves
from sluice.types import (
    ChatMessage,
    Failed,
    FailureKind,
    Prompt,
    ReplicaInfo,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TokenIds,
    Tool,
    seed_of,
)

PHASE = "generating"
ResultT = TypeVar("ResultT")


class Purpose(StrEnum):
    """The purpose of samples. Validation gets replicas before training."""

    VALIDATION = "validation"
    TRAINING = "training"


class GroupOverError(Exception):
    """A group has used its time or its tokens while it waited."""


@dataclass(slots=True, eq=False)
class GroupProgress:
    """The progress of one attempt of a group: the time and tokens that its requests share, and what
    replicas sent, counted on receipt.

    Attributes:
        rules: the limits of the group; by default none, as for validation.
        on_oldest_version: called with the oldest version among the tokens of the group whenever it
            may have changed; ``None`` while the group holds no token and waits.
        first_start: when a replica first accepted a request of the group, in seconds of the event
            loop's clock.
        prompt_token_ids: the prompt as that replica tokenized it, [prompt tokens].
        num_tokens: response tokens that its requests hold, unfinished samples included.
        has_finished_samples: at least one sample is complete.
        is_over: the group has used its time or tokens.
        engine_answered: a replica answered a request with an error of its engine.
        engine_errors: outcomes of samples that no replica could generate, by their index.
        replicas: replicas that got a request, by name, in the order of their first request.
        num_requested: samples requested from replicas.
        num_received: response tokens received, each counted once, even if a sample was interrupted
            or came in several messages.
        num_thrown_away: received tokens that no sample holds, since their sample restarted instead
            of continuing from them.
        num_replaced: tokens of samples without a grade for which others were generated.
    """

    rules: StragglerRules = field(default_factory=StragglerRules)
    on_oldest_version: Callable[[int | None], None] = lambda _version: None
    first_start: float | None = None
    prompt_token_ids: TokenIds | None = None
    num_tokens: int = 0
    has_finished_samples: bool = False
    is_over: bool = False
    engine_answered: bool = False
    engine_errors: dict[int, Failed] = field(default_factory=dict)
    replicas: list[str] = field(default_factory=list)
    num_requested: int = 0
    num_received: int = 0
    num_thrown_away: int = 0
    num_replaced: int = 0
    _versions: dict[object, int] = field(default_factory=dict)  # the oldest version of each part
    _observers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def replica_names(self) -> str:
        """Names of the replicas, for messages."""
        return ", ".join(self.replicas) or "none"

    @property
    def over_at(self) -> float | None:
        """When the group has used its time; a past time if it is over already."""
        return self.first_start if self.is_over else self.rules.over_at(self.first_start)

    def check(self, now_s: float) -> bool:
        """Return whether the group is over; end it if it has used its time or tokens."""
        if not self.rules.end_groups:
            return False
        over_at = self.over_at
        if (over_at is not None and over_at <= now_s) or self.rules.is_spent(self.num_tokens):
            self.end()
        return self.is_over

    def note_started(self, prompt_token_ids: TokenIds | None, now_s: float) -> None:
        """Note that a replica accepted a request of the group.

        Args:
            prompt_token_ids: the group's prompt; ``None`` for a request for a later turn.
            now_s: seconds of the event loop's clock.
        """
        if self.prompt_token_ids is None:
            self.prompt_token_ids = prompt_token_ids
        if self.first_start is None:
            self.first_start = now_s
            self._notify()

    def add_recalled(self, num_tokens: int, version: int | None) -> None:
        """Add tokens that an earlier service received; `version` is their oldest version."""
        self.num_tokens += num_tokens
        self.num_received += num_tokens
        self.note_version(object(), version)

    def note_version(self, part: object, version: int | None) -> None:
        """Note the oldest version of a part of the group; ``None`` if the part holds no token.

        Args:
            part: a key for the part; it must not refer to the part, or its samples would live in a
                reference cycle.
        """
        if version is None:
            self._versions.pop(part, None)
        else:
            self._versions[part] = version
        self.on_oldest_version(min(self._versions.values(), default=None))

    def end(self) -> None:
        """End the group because it has used its time or tokens."""
        if not self.is_over:
            self.is_over = True
            self._notify()

    @contextmanager
    def observed(self, observer: Callable[[], None]) -> Iterator[None]:
        """Call `observer` when `over_at` changes, while the block runs."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    async def run_until_over(self, work: Awaitable[ResultT]) -> ResultT:
        """Return the result of `work`; cancel it when the group has used its time or tokens.

        Raises:
            GroupOverError: the group was over before the work ended.
        """
        if not self.rules.end_groups:
            return await work
        try:
            async with asyncio.timeout_at(self.over_at) as scope:

                def reschedule() -> None:
                    if not scope.expired():
                        scope.reschedule(self.over_at)

                with self.observed(reschedule):
                    return await work
        except TimeoutError:
            if not scope.expired():
                raise
            self.end()
            raise GroupOverError from None

    def _notify(self) -> None:
        for observer in tuple(self._observers):
            observer()


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """What a turn of an episode reads, if it is more than the row's prompt.

    Args:
        number: of the turn in its episode, from 0.
        messages: the whole conversation, or the messages after `earlier`.
        earlier: tokens read and sampled so far, which begin the prompt; ``None`` if the turn is a
            root.
        tools: the tools that the policy may call.
        tool_format: how to parse answers; empty for the format of the run's policy.
        affinity: names the episode, for engines that cache; may be empty. For several samples: the
            common beginning of their episodes' names, up to a dot.
        max_sequence_tokens: limit of tokens read and sampled together; 0 limits only the row's
            prompt and the response.
        prefer: replica of the turn before; may be empty.
    """

    number: int
    messages: tuple[ChatMessage, ...]
    earlier: TokenIds | None = None
    tools: tuple[Tool, ...] = ()
    tool_format: str = ""
    affinity: str = ""
    max_sequence_tokens: int = 0
    prefer: str = ""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Samples of one prompt, from replicas of `lowest_version` up to `highest_version`.

    A sample's randomness depends only on the seed and its index, not on the other samples of the
    request. So a group may be generated in parts, by several requests. The parts share `progress`,
    which limits the group and counts its tokens.

    With `allows_missing`, samples that no replica could generate are left out, unless none remains.
    A request for a `turn` returns without missing samples instead of raising: the episode decides.
    With `is_baseline`, the sample is the baseline of others and is not trained.
    """

    prompt: Prompt
    sample_indexes: tuple[int, ...]
    sampling: SamplingParams
    purpose: Purpose
    lowest_version: int
    highest_version: int | None = None
    progress: GroupProgress = field(default_factory=GroupProgress, compare=False, repr=False)
    allows_missing: bool = False
    turn: TurnRequest | None = None
    is_baseline: bool = False

    def requirement(self, num_sequences: int) -> ReplicaRequirement:
        """Return what a replica needs to sample `num_sequences` of them."""
        prefer = "" if self.turn is None else self.turn.prefer
        return ReplicaRequirement(num_sequences, self.lowest_version, self.highest_version, prefer)


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """One event of a replica's stream.

    Attributes:
        started: the prompt's tokens and the first policy version; in the first event only.
        rollouts: samples that ended, each with all of its tokens.
        deltas: new tokens of samples that have not ended.
        engine_tokens: tokens that the replica's engine has generated for all requests; sent when
            these samples had no tokens for some time and samples wait for a slot there.
        continued_text: what the prompt adds to the turn that it continues; in the first event.
    """

    started: tuple[TokenIds, int] | None
    rollouts: tuple[Rollout, ...]
    deltas: tuple[NewTokens, ...] = ()
    engine_tokens: int | None = None
    continued_text: str = ""


class GenerationClient(Protocol):
    """Calls replicas."""

    def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream samples, and continue those in `partials`.

        Raise `SluiceError` on failure, and `InvalidRequestError` if a retry would be refused too.
        """
        ...

    async def adopt_fleet(self, replicas: Collection[ReplicaInfo]) -> None:
        """Adopt the fleet; forget all other replicas."""
        ...

    def after_backlog(self, callback: Callable[[], None]) -> None:
        """Call `callback` after everything that replicas have sent by now is read."""
        ...


class GroupFailedError(SluiceError):
    """A group cannot be generated: the engine refused it, or it failed too often.

    Args:
        message: what happened.
        kind: the failure kind of all its samples, if known.
    """

    def __init__(self, message: str, kind: FailureKind | None = None) -> None:
        super().__init__(message)
        self.kind = kind


class OverlongPromptError(GroupFailedError):
    """A prompt exceeds data.max_prompt_length and is not cut; it is left out with a warning."""


SampleCallback = Callable[[Rollout], None]


class SampleGenerator(Protocol):
    """Generates the samples of groups: the dispatcher or, with an environment,
    `EpisodeGenerator`."""

    def may_validate(self, version: int) -> bool:
        """Return whether a replica, busy or paused, serves validations of `version`."""
        ...

    async def generate(
        self, request: GroupRequest, on_sample: SampleCallback | None = None
    ) -> RolloutGroup:
        """Generate the requested samples; see `GroupDispatcher.generate`."""
        ...


def decisive_error(group: ExceptionGroup[Exception]) -> SluiceError:
    """Return the error that decides how a prompt ends; raise the group if it contains a defect."""
    causes = leaves(group)
    errors = [error for error in causes if isinstance(error, SluiceError)]
    if len(errors) < len(causes):
        raise group
    # In this order: an error that every prompt would meet, a refusal of this prompt, the rest.
    return max(
        errors,
        key=lambda error: (
            not isinstance(error, GroupFailedError),
            type(error) is not GroupFailedError,
        ),
    )


def for_prompt(sampling: SamplingParams, prompt: Prompt, *, label: str) -> SamplingParams:
    """Return the same parameters with the prompt's seed.

    The seed depends on the base seed and `label`; for a data-set row also on its position in the
    stream, so that a resumed run generates the same as an uninterrupted one; for a client's prompt
    also on its number in the order of issue.
    """
    number = prompt.sequence if prompt.position is None else prompt.position
    if prompt.source:  # rows of several sources have the same positions
        label = f"{label}/{prompt.source}"
    return replace(sampling, seed=seed_of(f"{sampling.seed}/{label}/{prompt.origin}/{number}"))
