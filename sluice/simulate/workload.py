"""What prompts bring: how often they are solved, and how long the answers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sluice.algorithm.group_filter import filter_values
from sluice.algorithm.sampling.pass_rates import HARD_BELOW
from sluice.types import PromptEnd


@dataclass(frozen=True, slots=True)
class SimulatedPrompt:
    """A prompt as it is issued.

    Args:
        key: names it across visits.
        pass_rate: true probability that a sample is right, now.
        is_long: among the tenth of prompts with the longest expected responses.
        number: its place in the workload.
    """

    key: str
    pass_rate: float
    is_long: bool
    number: int

    @property
    def is_hard(self) -> bool:
        """Whether it is hardly ever solved."""
        return self.pass_rate < HARD_BELOW


@dataclass(frozen=True, slots=True)
class SimulatedSamples:
    """All samples that a group would draw.

    Args:
        tokens: response length of each.
        are_right: whether each is right.
        values: the group filter's metric of each; ``None``: 1 of a right one, 0 of a wrong one.
        is_filtered: whether there is a group filter.
    """

    tokens: list[int]
    are_right: list[bool]
    values: list[float] | None = None
    is_filtered: bool = True

    def end(self, num_samples: int) -> PromptEnd | None:
        """How a group of the first `num_samples` (>= 1) ends if it is filtered; ``None``: kept."""
        if not self.is_filtered:
            return None
        grades = self.are_right[:num_samples]
        return filter_values(self.values[:num_samples] if self.values else grades, grades)

    @property
    def is_mixed(self) -> bool:
        """Whether the whole group would be kept: its metric differs, or there is no filter."""
        return self.end(len(self.are_right)) is None


class Workload(Protocol):
    """A data set with a policy's answers to it; the same calls give the same answers."""

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """The prompt drawn at `position` (0, 1, ... over all epochs) under a policy version."""
        ...

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        """The samples of a group; another `attempt` (0, 1, ...) draws others."""
        ...
