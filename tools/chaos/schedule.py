"""The faults of a run and their times: a pure function of the seed, so that a run can be repeated.

Kinds are dealt from a shuffled deck that is renewed when it is empty, so that each comes about as
often as it lies in the deck. A random number decides which candidate of that moment is hit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """A kind of fault."""

    KILL_REPLICA = "kill_replica"
    STOP_REPLICA = "stop_replica"
    KILL_REWARD = "kill_reward"
    STOP_REWARD = "stop_reward"
    KILL_TRAINER = "kill_trainer"
    STOP_TRAINER = "stop_trainer"
    KILL_ALL = "kill_all"
    KILL_SCORER = "kill_scorer"
    LEAVE = "leave"  # SIGTERM to a replica: it drains and stays away
    SCALE_DOWN = "scale_down"
    JOIN = "join"
    PARTITION = "partition"
    DELAY = "delay"


_DECK = (*FaultKind, FaultKind.KILL_REPLICA, FaultKind.STOP_REPLICA, FaultKind.PARTITION)
_LONGEST_S = {
    FaultKind.STOP_REPLICA: (1.0, 15.0),
    FaultKind.STOP_REWARD: (1.0, 8.0),
    FaultKind.STOP_TRAINER: (1.0, 8.0),
    FaultKind.PARTITION: (3.0, 10.0),
    FaultKind.DELAY: (4.0, 10.0),
}
# The supervisor accepts five deaths in a row; a life of two minutes ends the row.
_MOST_DEATHS, _NEW_COUNT_S = 4, 150.0
_KILLS = {
    FaultKind.KILL_TRAINER: ("trainer",),
    FaultKind.KILL_REWARD: ("reward",),
    FaultKind.KILL_ALL: ("trainer", "reward"),
}
_CHANGES = {FaultKind.LEAVE: -1, FaultKind.SCALE_DOWN: -1, FaultKind.JOIN: 1}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when, seconds from the first possible moment.
        kind: what.
        choice: in [0, 1): which of the candidates is hit.
        seconds: how long a stop, partition or delay lasts; 0: no such length.
    """

    at_s: float
    kind: FaultKind
    choice: float
    seconds: float


def draw_schedule(
    seed: int, seconds: float, *, interval_s: float, replicas: int
) -> tuple[Fault, ...]:
    """Return faults in order of time; the last one has ended before `seconds`.

    Args:
        seed: everything follows from it and the other arguments.
        seconds: how long faults may come.
        interval_s: mean time between two; each gap is 0.5 to 1.5 times as long.
        replicas: of the launcher at the beginning; leaving and joining keep between 1 and one more.
    """
    rng, deck = random.Random(seed), _Deck(replicas)
    faults, at_s = [], rng.uniform(0.0, interval_s)
    while at_s < seconds:
        kind = deck.deal(rng, at_s)
        shortest_s, longest_s = _LONGEST_S.get(kind, (0.0, 0.0))
        length_s = min(rng.uniform(shortest_s, longest_s), seconds - at_s)
        faults.append(Fault(round(at_s, 2), kind, rng.random(), round(length_s, 2)))
        at_s += interval_s * rng.uniform(0.5, 1.5)
    return tuple(faults)


class _Deck:
    """Deals kinds, and skips those that are not possible at a moment."""

    def __init__(self, replicas: int) -> None:
        self._cards: list[FaultKind] = []
        self._replicas, self._most = replicas, replicas + 1
        self._deaths: dict[str, list[float]] = {"trainer": [], "reward": []}

    def deal(self, rng: random.Random, at_s: float) -> FaultKind:
        while True:
            for kind in self._cards:
                if self._is_possible(kind, at_s):
                    self._cards.remove(kind)
                    self._note(kind, at_s)
                    return kind
            self._cards = list(_DECK)
            rng.shuffle(self._cards)

    def _is_possible(self, kind: FaultKind, at_s: float) -> bool:
        if not 1 <= self._replicas + _CHANGES.get(kind, 0) <= self._most:
            return False
        return all(len(self._row(name, at_s)) < _MOST_DEATHS for name in _KILLS.get(kind, ()))

    def _row(self, name: str, at_s: float) -> list[float]:
        """Return deaths since the service last lived for long."""
        deaths = self._deaths[name]
        if deaths and at_s - deaths[-1] >= _NEW_COUNT_S:
            deaths.clear()
        return deaths

    def _note(self, kind: FaultKind, at_s: float) -> None:
        self._replicas += _CHANGES.get(kind, 0)
        for name in _KILLS.get(kind, ()):
            self._row(name, at_s).append(at_s)
