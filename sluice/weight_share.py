"""The parts of the weights that workers take and trainer ranks hold, and places in an epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of one dimension of a tensor that a worker takes.

    `ranges` are (start, length) in elements, rising, with something between two of them.
    """

    dimension: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WeightShare:
    """The part of the weights that one worker of a replica computes with.

    `cuts` are by tensor, in order of name, each with rising dimensions. A tensor takes what all its
    cuts have in common; one that is not named is taken whole.
    """

    cuts: tuple[tuple[str, tuple[Cut, ...]], ...] = ()


WHOLE = WeightShare()
"""All weights."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of the weights that one trainer rank holds and sends.

    `parts` are by tensor, in the order of the weights, each with its cuts; a tensor without cuts is
    held whole, and one that is not named is not held.
    """

    rank: int
    parts: tuple[tuple[str, tuple[Cut, ...]], ...]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker's place in an epoch: the group of all workers with its share, and its rank there."""

    group: int
    rank: int
    world_size: int
    plan_digest: str
