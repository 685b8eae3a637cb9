"""Keeps hard prompts among the trained ones as frequent as plain drawing would (coverage guard).

Prompts and groups that are not worth their tokens are drawn all the same with a probability that
is known. So each kept group stands for ``1 / probability`` groups of plain drawing (Horvitz and
Thompson 1952), which gives an unbiased estimate of the share h of hard prompts that plain drawing
would train. Kept groups fall into three classes: *sure* ones that met no such choice, and those
that passed one on the *easy* or on the *hard* side.

The easy side is drawn as rarely as allowed, with e = exploration; the hard side with ``w * worth``,
so that what is hopeless for certain is drawn less often than what is merely hard. With plain
drawing the classes would number M, E and W groups, Mh, Eh and Wh of them hard, and W' and Wh' be
those of the hard side weighted by their worth. The share of hard ones is t if

    Mh + e Eh + w Wh' = t (M + e E + w W')

which is solved for w. The aim t is h, corrected by what the share was of late. If even the smallest
w leaves more than `MOST` times h, e is raised instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

DECAY_PER_GROUP = 0.998
MOST = 1.06
"""Largest share of hard prompts that is left alone, over that of plain drawing."""

GAIN = 2.0
_LEAST_KEPT = 32.0  # groups, below which nothing is said about shares


class Side(StrEnum):
    """Which choice a group passed: none, or one for prompts too easy, or one for those too hard."""

    SURE = "sure"
    EASY = "easy"
    HARD = "hard"


@dataclass(frozen=True, slots=True)
class _Class:
    plain: float = 0.0  # groups of plain drawing that the kept ones stand for
    plain_hard: float = 0.0
    worth: float = 0.0  # the same, weighted by their worth
    worth_hard: float = 0.0
    real: float = 0.0
    real_hard: float = 0.0

    def plus(self, hardness: float, worth: float, probability: float) -> _Class:
        stands_for = 1.0 / probability
        return _Class(
            self.plain + stands_for,
            self.plain_hard + hardness * stands_for,
            self.worth + worth * stands_for,
            self.worth_hard + hardness * worth * stands_for,
            self.real + 1.0,
            self.real_hard + hardness,
        )

    def decayed(self) -> _Class:
        counts = (self.plain, self.plain_hard, self.worth, self.worth_hard)
        return _Class(*(DECAY_PER_GROUP * count for count in (*counts, self.real, self.real_hard)))


@dataclass(frozen=True, slots=True)
class CoverageGuard:
    """Shares of hard prompts among kept groups, and the probabilities that keep them.

    Args:
        exploration: least probability of a draw that is not worth its tokens.
        is_on: off: both sides are drawn with `exploration`, whatever that does to the shares.
    """

    exploration: float
    is_on: bool = True
    classes: dict[Side, _Class] = field(default_factory=lambda: {side: _Class() for side in Side})

    def kept(
        self, side: Side, *, hardness: float, worth: float, probability: float
    ) -> CoverageGuard:
        """After one more kept group.

        Args:
            side: the choice it passed.
            hardness: probability that its prompt is hard, given all its samples.
            worth: of the choice it passed, as given to `probability`.
            probability: with which it was drawn.
        """
        classes = {other: counted.decayed() for other, counted in self.classes.items()}
        classes[side] = classes[side].plus(hardness, worth, probability)
        return replace(self, classes=classes)

    @property
    def plain_share(self) -> float:
        """Estimated share of hard prompts that plain drawing would train; 0 before any group."""
        plain = sum(c.plain for c in self.classes.values())
        return sum(c.plain_hard for c in self.classes.values()) / plain if plain else 0.0

    @property
    def share(self) -> float:
        """Share of hard prompts among the kept groups; 0 before any group."""
        real = sum(c.real for c in self.classes.values())
        return sum(c.real_hard for c in self.classes.values()) / real if real else 0.0

    @property
    def ratio(self) -> float:
        """`share` over `plain_share`; 1 while nothing is known."""
        return self.share / self.plain_share if self.plain_share else 1.0

    def probability(self, side: Side, worth: float = 1.0) -> float:
        """With which a draw is made, in (0, 1]; 1 for `Side.SURE`.

        Args:
            side: of the choice.
            worth: what is expected to be trained, times the price, over what is expected to be
                drawn; in [0, 1].
        """
        if side is Side.SURE:
            return 1.0
        if not self.is_on:
            return self.exploration
        easy, hard = self._solved()
        return easy if side is Side.EASY else min(1.0, max(self.exploration, hard * worth))

    def _solved(self) -> tuple[float, float]:
        """e and w; w has no upper bound."""
        sure, easy, hard = (self.classes[s] for s in (Side.SURE, Side.EASY, Side.HARD))
        e, h = self.exploration, self.plain_share
        if sure.real + easy.real + hard.real < _LEAST_KEPT or not h:
            return e, math.inf
        w = self._hard_factor(h * (1.0 + GAIN * (1.0 - self.ratio)))
        if w > 0.0 and hard.worth:
            return e, w
        most = MOST * h
        surplus = sure.plain_hard + e * hard.plain_hard - most * (sure.plain + e * hard.plain)
        room = most * easy.plain - easy.plain_hard
        return (min(1.0, max(e, surplus / room)) if room > 0.0 else e), w

    def _hard_factor(self, aim: float) -> float:
        """w for a share of `aim` with the easy side at its rarest."""
        sure, easy, hard = (self.classes[s] for s in (Side.SURE, Side.EASY, Side.HARD))
        e = self.exploration
        steer = hard.worth_hard - aim * hard.worth
        if steer <= 0.0:  # the hard side is no harder than the rest: drawing it all is plain
            return math.inf
        wanted = aim * (sure.plain + e * easy.plain) - sure.plain_hard - e * easy.plain_hard
        return max(0.0, wanted / steer)
