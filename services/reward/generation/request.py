"""A request for samples of one prompt: its key, seeds and budget, and the errors that end
it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from struct import Struct
from typing import Protocol

from services.reward.generation.queue import Priority
from sluice.algorithm.growing_sample import NewTokens
from sluice.config.schema.rollout import RolloutConfig
from sluice.errors import SluiceError, leaves
from sluice.types import FailureKind, Prompt, ReplicaInfo, Rollout, SamplingParams, TokenIds

_KEY_BYTES = 16
_FRAME = Struct("<Q").pack


def prompt_key(prompt: Prompt) -> str:
    """BLAKE2b of messages, ground truth and images, 16 bytes in hexadecimal."""
    framed: list[bytes] = []
    for turn in prompt.messages:
        framed += _framed(turn.role), _framed(turn.content)
    framed.append(_framed(prompt.ground_truth))
    framed += (blake2b(image, digest_size=_KEY_BYTES).digest() for image in prompt.images)
    return blake2b(b"".join(framed), digest_size=_KEY_BYTES).hexdigest()


def _framed(part: str) -> bytes:
    """With its length, or "ab" + "c" would be "a" + "bc"."""
    encoded = part.encode()
    return _FRAME(len(encoded)) + encoded


# What bounds one group, and what is counted for it, over all of its requests.


@dataclass(slots=True, eq=False)
class GroupBudget:
    """The time and tokens of one group, shared by all of its requests.

    Attributes:
        first_start: when a replica took a part of it on first, in seconds of the event loop's
            clock.
        prompt_token_ids: its prompt as that replica reads it, [prompt tokens].
        num_tokens: response tokens that its parts hold, of unfinished samples too.
        has_finished_samples: any of its samples is complete.
        is_over: it has taken its time or its tokens.
        engine_answered: a replica answered a request for it with an error of its engine.
        engine_errors: why no replica could generate a sample, by its index.
    """

    first_start: float | None = None
    prompt_token_ids: TokenIds | None = None
    num_tokens: int = 0
    has_finished_samples: bool = False
    is_over: bool = False
    engine_answered: bool = False
    engine_errors: dict[int, str] = field(default_factory=dict)
    _observers: list[Callable[[], None]] = field(default_factory=list)

    def started(self, prompt_token_ids: TokenIds, now: float) -> None:
        """A replica took a part of it on."""
        if self.first_start is None:
            self.first_start, self.prompt_token_ids = now, prompt_token_ids
            self._notify()

    def end(self) -> None:
        """It has taken its time or its tokens."""
        if not self.is_over:
            self.is_over = True
            self._notify()

    @contextmanager
    def observed(self, observer: Callable[[], None]) -> Iterator[None]:
        """Call `observer` when the group starts or is over, while the block runs."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def _notify(self) -> None:
        for observer in tuple(self._observers):
            observer()


@dataclass(slots=True, eq=False)
class GroupTokens:
    """What replicas sent for one group in one attempt, counted where it is received.

    Attributes:
        replicas: who was asked, by name, in the order first asked.
        num_samples: samples that a replica was asked for.
        num_received: response tokens, each once, however often a sample was broken off and in how
            many messages it came.
        num_thrown_away: those of them that no sample holds any more, since the sample was not
            continued from them but started again.
        num_replaced: tokens of samples without a grade, in whose places others were generated.
    """

    replicas: list[str] = field(default_factory=list)
    num_samples: int = 0
    num_received: int = 0
    num_thrown_away: int = 0
    num_replaced: int = 0

    def __str__(self) -> str:
        return ", ".join(self.replicas) or "none"


PHASE = "generating"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Samples of one prompt, from replicas of `lowest_version` up to `highest_version`.

    A sample does not depend on the others of its request: its randomness depends on the seed and
    its index alone. So a group may be generated in parts, each by its own request. The parts share
    `budget`, which bounds the group, and `tokens`, which counts what is received for it.

    With `allows_missing` the samples that no replica could generate are left out, unless none is
    left.
    """

    prompt: Prompt
    sample_indexes: tuple[int, ...]
    sampling: SamplingParams
    priority: Priority
    lowest_version: int
    highest_version: int | None = None
    budget: GroupBudget = field(default_factory=GroupBudget, compare=False, repr=False)
    tokens: GroupTokens = field(default_factory=GroupTokens, compare=False, repr=False)
    allows_missing: bool = False

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
        engine_tokens: tokens that the replica's engine has generated for all requests; sent when
            none came of these samples for some time and samples wait for a slot there.
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
        """Stream samples, and continue those in `partials`.

        `SluiceError` on failure, `InvalidRequestError` if a retry would be refused, too.
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


class OldestStart:
    """The oldest of the versions under which the parts of a group began.

    Args:
        on_start: called whenever a part's version changes; ``None``: no part holds anything.
    """

    def __init__(self, on_start: StartCallback) -> None:
        self._on_start = on_start
        self._versions: dict[str, int | None] = {}

    def of(self, part: str) -> StartCallback:
        """What a part's request is given."""

        def note(version: int | None) -> None:
            self._versions[part] = version
            started = [known for known in self._versions.values() if known is not None]
            self._on_start(min(started, default=None))

        return note


def decisive(group: ExceptionGroup[Exception]) -> SluiceError:
    """Return the error that decides how a prompt ends; raise the group if it holds a defect."""
    found = leaves(group)
    errors = [error for error in found if isinstance(error, SluiceError)]
    if len(errors) < len(found):
        raise group
    return max(errors, key=_gravity)


def _gravity(error: SluiceError) -> int:
    """What all prompts would meet, then what is said of this prompt, then what one group met."""
    if not isinstance(error, GroupFailedError):
        return 2
    return int(type(error) is not GroupFailedError)


_SEED_BYTES = 8
_SEED_MASK = 2**63 - 1


def training_sampling(rollout: RolloutConfig, max_tokens: int) -> SamplingParams:
    """Training parameters; the seed is filled in per prompt."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=max_tokens,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def greedy_sampling(training: SamplingParams) -> SamplingParams:
    """The most probable token at every place, with the limits of the training samples."""
    return replace(training, temperature=0.0, top_p=1.0, top_k=-1)


def validation_sampling(
    rollout: RolloutConfig, max_tokens: int, temperature: float | None
) -> SamplingParams:
    """Validation parameters; `temperature` overrides the configured one."""
    wanted = rollout.val_kwargs
    return SamplingParams(
        temperature=wanted.temperature if temperature is None else temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        max_tokens=max_tokens,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def for_prompt(sampling: SamplingParams, prompt: Prompt, *, stage: str) -> SamplingParams:
    """The same parameters with a seed of the prompt's own.

    It depends on the base seed and on where the prompt stands: a data-set row on its position in
    the stream (so a resumed run generates what the unbroken one would have), a client's prompt
    on its number in the order of issue.
    """
    place = prompt.sequence if prompt.position is None else prompt.position
    text = f"{sampling.seed}/{stage}/{prompt.origin}/{place}"
    digest = blake2b(text.encode(), digest_size=_SEED_BYTES).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little") & _SEED_MASK)
