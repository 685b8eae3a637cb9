"""Keeps hard prompts among the trained ones as frequent as plain sampling would (docs/sampling.md,
"Coverage guard").

Kept groups fall into four classes: those that met no choice, *plain* ones that are worth their
tokens but less likely hard than kept groups are on average, and those that passed a choice on the
*easy* or on the *hard* side. The easy side is started with probability e, the plain one with s,
the hard side with ``w * worth``. With plain sampling the classes would number M, P, E and W groups,
Mh, Ph, Eh and Wh of them hard; W' and Wh' are W and Wh weighted by their worth. The share of hard
ones is t if

    Mh + s Ph + e Eh + w Wh' = t (M + s P + e E + w W')

which is solved for w with s = 1. Where that takes more than `MAX_HARD_FACTOR`, w stays there and s
is solved for, down to `MIN_PLAIN`, and only then w is raised. If even the smallest w leaves more
than `MAX_EXCESS` times the share of plain sampling, e is raised instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

DECAY_PER_GROUP = 0.998
"""Weight of the past at each kept group: shares cover about 500 groups."""

AIM = 1.05
"""Share of hard prompts to keep, over the share that plain sampling trains. Prompts become
easier, and the evidence on them is older than the group: some that seem hard no longer are."""

MAX_EXCESS = 1.08
"""Largest share of hard prompts that is left alone, over the share that plain sampling trains."""

MAX_HARD_FACTOR = 0.4
"""Largest w that still starts the plain side in full."""

MIN_PLAIN = 0.3
"""Least probability of starting a prompt on the plain side."""

GAIN = 2.0
"""How strongly the present ratio of the shares moves the share that is aimed at."""

_MIN_KEPT_GROUPS = 32.0  # with fewer groups the shares are unknown


class Side(StrEnum):
    """Which choice a group passed: none, or one for prompts too easy, or one for those too hard.

    ``PLAIN`` is worth its tokens, and started less often only to keep the share of hard prompts.
    """

    NONE = "none"
    PLAIN = "plain"
    EASY = "easy"
    HARD = "hard"


@dataclass(frozen=True, slots=True)
class _Class:
    expected: float = 0.0  # groups of plain sampling that the kept ones stand for
    expected_hard: float = 0.0
    value: float = 0.0  # the same, weighted by their worth
    value_hard: float = 0.0
    real: float = 0.0
    real_hard: float = 0.0

    def plus(self, hardness: float, value: float, probability: float) -> _Class:
        stands_for = 1.0 / probability
        return _Class(
            self.expected + stands_for,
            self.expected_hard + hardness * stands_for,
            self.value + value * stands_for,
            self.value_hard + hardness * value * stands_for,
            self.real + 1.0,
            self.real_hard + hardness,
        )

    def decay(self) -> _Class:
        counts = (self.expected, self.expected_hard, self.value, self.value_hard)
        return _Class(*(DECAY_PER_GROUP * count for count in (*counts, self.real, self.real_hard)))


@dataclass(frozen=True, slots=True)
class CoverageGuard:
    """Shares of hard prompts among kept groups, and the probabilities that keep them.

    Args:
        exploration: least probability of starting a prompt that is not worth its tokens.
        is_on: off: prompts that are too easy or too hard are started with `exploration`, all others
            always, regardless of the shares.
    """

    exploration: float
    is_on: bool = True
    classes: dict[Side, _Class] = field(default_factory=lambda: {side: _Class() for side in Side})

    def add_kept(
        self, side: Side, *, hardness: float, value: float, probability: float
    ) -> CoverageGuard:
        """Return the guard after one more kept group.

        Args:
            hardness: probability that its prompt is hard, given all its samples.
            value: of the choice it passed, as given to `probability`, times the probability of any
                other that it passed.
        """
        classes = {other_side: counted.decay() for other_side, counted in self.classes.items()}
        classes[side] = classes[side].plus(hardness, value, probability)
        return replace(self, classes=classes)

    @property
    def plain_share(self) -> float:
        """Estimated share of hard prompts that plain sampling would train; 0 before any group."""
        expected = sum(c.expected for c in self.classes.values())
        return sum(c.expected_hard for c in self.classes.values()) / expected if expected else 0.0

    @property
    def share(self) -> float:
        """Share of hard prompts among the kept groups; 0 before any group."""
        real = sum(c.real for c in self.classes.values())
        return sum(c.real_hard for c in self.classes.values()) / real if real else 0.0

    @property
    def ratio(self) -> float:
        """`share` over `plain_share`; 1 while nothing is known."""
        return self.share / self.plain_share if self.plain_share else 1.0

    def probability(self, side: Side, value: float = 1.0) -> float:
        """Return the probability of a start, in (0, 1]; 1 for `Side.NONE`.

        Args:
            value: the choice's worth, used on the hard side only: expected trained samples, times
                the price, over expected started samples; in [0, 1].
        """
        if side is Side.NONE or (side is Side.PLAIN and not self.is_on):
            return 1.0
        if not self.is_on:
            return self.exploration
        easy, plain, hard = self._solve()
        if side is Side.PLAIN:
            return plain
        return easy if side is Side.EASY else min(1.0, max(self.exploration, hard * value))

    def _solve(self) -> tuple[float, float, float]:
        """Return e, s and w; w has no upper bound."""
        e, h = self.exploration, self.plain_share
        if sum(c.real for c in self.classes.values()) < _MIN_KEPT_GROUPS or not h:
            return e, 1.0, math.inf
        aim = h * (AIM + GAIN * (AIM - self.ratio))
        w = self._hard_factor(aim, 1.0)
        if not w or not self.classes[Side.HARD].value:
            return self._easy_probability(MAX_EXCESS * h), 1.0, w
        if w <= MAX_HARD_FACTOR:
            return e, 1.0, w
        s = self._plain_probability(aim)
        return e, s, max(MAX_HARD_FACTOR, self._hard_factor(aim, s))

    def _excess(self, aim: float, s: float) -> float:
        """Return the hard groups beyond a share of `aim`, with none of the hard side."""
        unchosen, plain, easy = (self.classes[x] for x in (Side.NONE, Side.PLAIN, Side.EASY))
        e = self.exploration
        hard = unchosen.expected_hard + s * plain.expected_hard + e * easy.expected_hard
        return hard - aim * (unchosen.expected + s * plain.expected + e * easy.expected)

    def _steer(self, aim: float) -> float:
        """Return the hard groups beyond a share of `aim` that w = 1 brings."""
        return self.classes[Side.HARD].value_hard - aim * self.classes[Side.HARD].value

    def _hard_factor(self, aim: float, s: float) -> float:
        """Return w for a share of `aim` with the easy side at its rarest."""
        steer = self._steer(aim)
        if steer <= 0.0:  # the hard side is no harder than the rest: start all of it
            return math.inf
        return max(0.0, -self._excess(aim, s) / steer)

    def _plain_probability(self, aim: float) -> float:
        """Return s for a share of `aim` with w at `MAX_HARD_FACTOR`."""
        plain = self.classes[Side.PLAIN]
        softens = aim * plain.expected - plain.expected_hard
        if softens <= 0.0 or self._steer(aim) <= 0.0:
            return 1.0
        surplus = self._excess(aim, 0.0) + MAX_HARD_FACTOR * self._steer(aim)
        return min(1.0, max(MIN_PLAIN, self.exploration, surplus / softens))

    def _easy_probability(self, max_share: float) -> float:
        """Return e for a share of at most `max_share`, with the hard side at its rarest."""
        other_classes = (self.classes[Side.NONE], self.classes[Side.PLAIN])
        easy, hard = self.classes[Side.EASY], self.classes[Side.HARD]
        e = self.exploration
        surplus = sum(c.expected_hard - max_share * c.expected for c in other_classes)
        surplus += e * (hard.expected_hard - max_share * hard.expected)
        capacity = max_share * easy.expected - easy.expected_hard
        return min(1.0, max(e, surplus / capacity)) if capacity > 0.0 else e
