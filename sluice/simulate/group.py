"""A group under way in the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.algorithm.groups.filter import MIN_SAMPLES, filter_values
from sluice.algorithm.routing import Reservation
from sluice.algorithm.sampling.attempt import Attempt
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples
from sluice.types import PromptEnd


@dataclass(slots=True, eq=False)
class SimulatedSample:
    """One sequence at a replica. `start_clock` is ``None`` while it waits for a slot."""

    part: GroupPart
    tokens: int
    is_right: bool
    start_clock: float | None = None
    oldest_version: int = -1
    is_over: bool = False


@dataclass(slots=True, eq=False)
class GroupPart:
    """The samples of a group in one request, at one replica."""

    group: SimulatedGroup
    replica: int
    reservation: Reservation
    num_missing: int
    samples: list[SimulatedSample] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """A prompt that was issued, with all samples that it could have.

    Args:
        position: in the data set, over all epochs; the order of issue as well.
        prompt: its prompt.
        issued_version: announced when it was first issued.
        attempt: the strategy's decision; replaced by its decision after the first samples.
        samples: chosen in advance.
        num_needed: samples that were requested, or will be when a replica has capacity.
        num_asked: samples at replicas so far.
        num_finished: of those, finished.
        grades: of those that are graded one by one, as first samples are: whether each is right.
        parts: what is at replicas.
        replicas: where it has been, in order.
        start_version: of its oldest sample; ``None`` until a replica starts it.
        num_restarts: how often it was cancelled.
        admitted_as: the decision when its prompt was issued.
    """

    position: int
    prompt: SimulatedPrompt
    issued_version: int
    attempt: Attempt
    samples: SimulatedSamples
    num_restarts: int = 0
    num_needed: int = 0
    num_asked: int = 0
    num_finished: int = 0
    start_version: int | None = None
    issued_s: float = 0.0
    started_s: float = 0.0
    generated_s: float = 0.0
    finished_tokens: int = 0
    grades: list[bool] = field(default_factory=list)
    sample_versions: list[int] = field(default_factory=list)
    parts: list[GroupPart] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    admitted_as: Attempt = field(init=False)

    def __post_init__(self) -> None:
        self.admitted_as = self.attempt

    @property
    def name(self) -> str:
        """Its prompt id."""
        return str(self.position)

    @property
    def oldest_version(self) -> int:
        """Of its oldest token."""
        return min(self.sample_versions)

    @property
    def num_right(self) -> int:
        """How many of the requested samples are right."""
        return sum(self.samples.are_right[: self.num_asked])

    @property
    def end(self) -> PromptEnd | None:
        """How the group ends if its requested samples get it filtered; ``None``: it is kept."""
        return self.samples.end(self.num_asked)

    @property
    def is_sure(self) -> bool:
        """Whether it will be kept whatever its other samples are: the requested ones differ."""
        return self.num_asked >= MIN_SAMPLES and self.end is None

    @property
    def differs(self) -> bool:
        """Whether the grades of the samples that are graded one by one differ."""
        if len(self.grades) < MIN_SAMPLES:
            return False
        return filter_values(self.grades, self.grades) is None

    def record_grade(self, *, is_right: bool) -> None:
        """Record the grade of one of its first samples."""
        self.grades.append(is_right)
