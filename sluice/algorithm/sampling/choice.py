"""The choices of strategies with probes or memory: pass by, stop, or go on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from sluice.algorithm.sampling.coverage_guard import CoverageGuard, Side
from sluice.algorithm.sampling.pass_rates import (
    PassRateBelief,
    Weights,
    hard_probability,
    mean_pass_rate,
    posterior,
)
from sluice.algorithm.sampling.rules import SamplingRules
from sluice.algorithm.sampling.visit import Attempt, AttemptEnd
from sluice.algorithm.sampling.worth import (
    plain_price,
    rest_of_group,
    saved_by_probes,
    whole_attempt,
)

_EASY_FROM = 0.5
_LEAST_SAVING = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What choices are made by: pass rates of the population, and the coverage guard."""

    belief: PassRateBelief
    guard: CoverageGuard
    population: Weights
    price: float

    @classmethod
    def of(cls, belief: PassRateBelief, guard: CoverageGuard, samples_per_group: int) -> Knowledge:
        """Knowledge with what follows from the belief."""
        population = belief.population
        return cls(belief, guard, population, plain_price(population, samples_per_group))

    def after(self, ends: list[AttemptEnd], samples_per_group: int) -> Knowledge:
        """What is known once these groups have ended."""
        guard = self.guard
        seen = []
        for end in ends:
            grade_counts = end.attempt.known(end.version) + end.grade_counts
            seen.append((grade_counts, 1.0 / end.attempt.admission_probability))
            if end.kept:
                hardness = hard_probability(posterior(self.population, grade_counts))
                attempt = end.attempt
                guard = guard.kept(
                    attempt.side,
                    hardness=hardness,
                    value=attempt.value,
                    probability=attempt.probability,
                )
        return Knowledge.of(self.belief.learn(seen), guard, samples_per_group)


def choose_attempt(
    knowledge: Knowledge, rules: SamplingRules, attempt: Attempt, version: int
) -> Attempt:
    """Draw a known prompt or pass it by, by what earlier visits showed; with probes or without.

    Probes cost time, since the rest of a group starts later. They are left out where they would
    save fewer than `_LEAST_SAVING` samples.
    """
    weights = posterior(knowledge.population, attempt.known(version))
    n = rules.samples_per_group
    if rules.strategy.uses_probes and _saved(knowledge, rules, weights) < _LEAST_SAVING:
        attempt = replace(attempt, first_samples=n)
    stakes = whole_attempt(
        weights,
        probe_samples=None if attempt.first_samples == n else rules.probe_samples,
        samples_per_group=n,
        price=knowledge.price,
    )
    value = stakes.value(knowledge.price)
    side = _side(knowledge, weights, value)
    if side is Side.SURE:
        return attempt
    probability = knowledge.guard.probability(side, value)
    chosen = replace(_passed(attempt, side, value, probability), admission_probability=probability)
    is_admitted = _uniform(rules.seed, attempt, "visit") < probability
    return chosen if is_admitted else replace(chosen, first_samples=0)


def choose_rest(
    knowledge: Knowledge,
    rules: SamplingRules,
    attempt: Attempt,
    *,
    num_right: int,
    num_scored: int,
    version: int,
) -> Attempt | None:
    """Draw the rest of a group or stop it, by its first samples.

    Args:
        knowledge: at this time.
        rules: of the run.
        visit: the visit the probes are of.
        num_right: right probes.
        num_scored: graded probes; one that could not be graded says nothing.
        version: announced now.

    Returns:
        the visit that goes on, or ``None``: the group ends here, all right or all wrong.
    """
    if num_scored == 0 or 0 < num_right < num_scored:
        return attempt
    before = posterior(knowledge.population, attempt.known(version))
    stakes = rest_of_group(
        before,
        num_right=num_right,
        num_probes=num_scored,
        num_rest=rules.samples_per_group - attempt.first_samples,
        samples_per_group=rules.samples_per_group,
    )
    value = stakes.value(knowledge.price)
    if value >= 1.0:
        return attempt
    side = Side.EASY if num_right else Side.HARD
    # Exploration bounds what comes of both choices, or a group might stand for a hundred others.
    least = min(1.0, rules.exploration / attempt.probability)
    probability = max(least, knowledge.guard.probability(side, value))
    is_admitted = _uniform(rules.seed, attempt, "rest") < probability
    return _passed(attempt, side, value, probability) if is_admitted else None


def _side(knowledge: Knowledge, weights: Weights, value: float) -> Side:
    if value >= 1.0:
        keeps_up = hard_probability(weights) >= knowledge.guard.plain_share
        return Side.SURE if keeps_up else Side.PLAIN
    return Side.EASY if mean_pass_rate(weights) >= _EASY_FROM else Side.HARD


def _saved(knowledge: Knowledge, rules: SamplingRules, weights: Weights) -> float:
    return saved_by_probes(
        weights,
        probe_samples=rules.probe_samples,
        samples_per_group=rules.samples_per_group,
        price=knowledge.price,
    )


def _passed(attempt: Attempt, side: Side, value: float, probability: float) -> Attempt:
    """A group that passed two choices counts for the harder side.

    Its worth there is taken times the probability of the other choice: so what the guard expects
    of w is what comes of both. It is exact where w enters one of the two; of two choices of the
    hard side the first is with w as it was then.
    """
    before, together = attempt.probability, attempt.probability * probability
    if attempt.side is Side.HARD and side is Side.EASY:
        return replace(attempt, value=attempt.value * probability, probability=together)
    return replace(attempt, side=side, value=value * before, probability=together)


def _uniform(seed: int, attempt: Attempt, purpose: str) -> float:
    """A number in [0, 1) of the visit alone, so that a run repeats whatever the timing."""
    text = f"{seed}/{attempt.key}/{attempt.sequence}/{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
