"""Choose whether to skip a prompt, stop after its probes or sample the rest of its group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.algorithm.sampling.attempt import Attempt, AttemptEnd
from sluice.algorithm.sampling.coverage_guard import CoverageGuard, Side
from sluice.algorithm.sampling.pass_rates import (
    GradeCounts,
    PassRateBelief,
    Weights,
    all_right_probability,
    all_wrong_probability,
    hard_probability,
    mean_pass_rate,
    mixed_probability,
    posterior,
)
from sluice.algorithm.sampling.rules import SamplingRules

CERTAIN_GROUPS_PRICE = 1.0

_EASY_FROM = 0.5
_MIN_SAVING = 1.0


def plain_price(population: Weights, samples_per_group: int) -> float:
    """Return the samples generated for each trained one when no prompt is skipped; at least 1."""
    mixed = mixed_probability(population, samples_per_group)
    return max(CERTAIN_GROUPS_PRICE, 1.0 / max(mixed, 1e-6))


@dataclass(frozen=True, slots=True)
class AttemptEstimate:
    """The possible results of an attempt, in samples."""

    cost: float
    gain: float

    def value(self, price: float) -> float:
        """Return the expected samples to train, times the price, over those to generate.

        At 1 or more, each trained sample costs at most `price` generated ones.
        """
        return self.gain * price / self.cost


def rest_of_group(
    before_probes: Weights,
    *,
    num_right: int,
    num_probes: int,
    num_rest: int,
    samples_per_group: int,
) -> AttemptEstimate:
    """Return the rest of a group whose probes were all right or all wrong."""
    grade_counts = GradeCounts(float(num_right), float(num_probes - num_right))
    updated = posterior(before_probes, grade_counts)
    stays_uniform = all_right_probability if num_right else all_wrong_probability
    mixed = 1.0 - stays_uniform(updated, num_rest)
    return AttemptEstimate(float(num_rest), samples_per_group * mixed)


def whole_attempt(
    weights: Weights, *, probe_samples: int | None, samples_per_group: int, price: float
) -> AttemptEstimate:
    """Return the stakes of an attempt at a prompt, its probes included.

    Args:
        probe_samples: samples generated first; ``None``: all at once.
        price: decides whether groups with uniform probes continue.
    """
    n = samples_per_group
    if probe_samples is None:
        return AttemptEstimate(float(n), n * mixed_probability(weights, n))
    num_rest = n - probe_samples
    is_mixed = mixed_probability(weights, probe_samples)
    cost, gain = probe_samples + num_rest * is_mixed, n * is_mixed
    for chance, stakes in _uniform_probes(weights, probe_samples, n):
        if stakes.value(price) >= 1.0:
            cost, gain = cost + chance * stakes.cost, gain + chance * stakes.gain
    return AttemptEstimate(cost, gain)


def saved_by_probes(
    weights: Weights, *, probe_samples: int, samples_per_group: int, price: float
) -> float:
    """Return how many samples probes should save by stopping groups whose rest is not worth it."""
    return sum(
        chance * stakes.cost
        for chance, stakes in _uniform_probes(weights, probe_samples, samples_per_group)
        if stakes.value(price) < 1.0
    )


def _uniform_probes(
    weights: Weights, probe_samples: int, samples_per_group: int
) -> Iterator[tuple[float, AttemptEstimate]]:
    """Yield the probability that all probes are right, and the stake then; next for all wrong."""
    for num_right, chance in (
        (probe_samples, all_right_probability(weights, probe_samples)),
        (0, all_wrong_probability(weights, probe_samples)),
    ):
        yield (
            chance,
            rest_of_group(
                weights,
                num_right=num_right,
                num_probes=probe_samples,
                num_rest=samples_per_group - probe_samples,
                samples_per_group=samples_per_group,
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SamplingKnowledge:
    """What choices are made by: pass rates of the population, and the coverage guard."""

    belief: PassRateBelief
    guard: CoverageGuard
    population: Weights
    price: float

    @classmethod
    def of(
        cls, belief: PassRateBelief, guard: CoverageGuard, samples_per_group: int
    ) -> SamplingKnowledge:
        """Return the knowledge that follows from a belief."""
        population = belief.population
        return cls(belief, guard, population, plain_price(population, samples_per_group))

    def after(self, ends: list[AttemptEnd], samples_per_group: int) -> SamplingKnowledge:
        """Return the evidence once these groups have ended."""
        guard = self.guard
        weighted_grades = []
        for end in ends:
            grade_counts = end.attempt.earlier_grades(end.version) + end.grade_counts
            weighted_grades.append((grade_counts, 1.0 / end.attempt.admission_probability))
            if end.kept:
                hardness = hard_probability(posterior(self.population, grade_counts))
                attempt = end.attempt
                guard = guard.add_kept(
                    attempt.side,
                    hardness=hardness,
                    value=attempt.value,
                    probability=attempt.probability,
                )
        return SamplingKnowledge.of(self.belief.learn(weighted_grades), guard, samples_per_group)


def choose_attempt(
    knowledge: SamplingKnowledge, rules: SamplingRules, attempt: Attempt, version: int
) -> Attempt:
    """Start a known prompt or skip it, by what earlier attempts showed; with probes or without.

    Probes cost time, since the rest of a group starts later. They are left out where they would
    save fewer than `_MIN_SAVING` samples.
    """
    weights = posterior(knowledge.population, attempt.earlier_grades(version))
    n = rules.samples_per_group
    if rules.strategy.uses_probes and _saved(knowledge, rules, weights) < _MIN_SAVING:
        attempt = replace(attempt, first_samples=n)
    stakes = whole_attempt(
        weights,
        probe_samples=None if attempt.first_samples == n else rules.probe_samples,
        samples_per_group=n,
        price=knowledge.price,
    )
    value = stakes.value(knowledge.price)
    side = _side(knowledge, weights, value)
    if side is Side.NONE:
        return attempt
    probability = knowledge.guard.probability(side, value)
    chosen = replace(
        _chosen_attempt(attempt, side, value, probability), admission_probability=probability
    )
    is_admitted = _uniform(rules.seed, attempt, "visit") < probability
    return chosen if is_admitted else replace(chosen, first_samples=0)


def choose_rest(
    knowledge: SamplingKnowledge,
    rules: SamplingRules,
    attempt: Attempt,
    *,
    num_right: int,
    num_scored: int,
    version: int,
) -> Attempt | None:
    """Continue a group or stop it, by its first samples.

    Args:
        num_scored: graded probes; one that could not be graded does not count.

    Returns:
        the attempt that continues, or ``None``: the group ends here, all right or all wrong.
    """
    if num_scored == 0 or 0 < num_right < num_scored:
        return attempt
    earlier_weights = posterior(knowledge.population, attempt.earlier_grades(version))
    stakes = rest_of_group(
        earlier_weights,
        num_right=num_right,
        num_probes=num_scored,
        num_rest=rules.samples_per_group - attempt.first_samples,
        samples_per_group=rules.samples_per_group,
    )
    value = stakes.value(knowledge.price)
    if value >= 1.0:
        return attempt
    side = Side.EASY if num_right else Side.HARD
    # Exploration bounds the product of both choices, or a group might represent a hundred others.
    min_probability = min(1.0, rules.exploration / attempt.probability)
    probability = max(min_probability, knowledge.guard.probability(side, value))
    is_admitted = _uniform(rules.seed, attempt, "rest") < probability
    return _chosen_attempt(attempt, side, value, probability) if is_admitted else None


def _side(knowledge: SamplingKnowledge, weights: Weights, value: float) -> Side:
    if value >= 1.0:
        keeps_up = hard_probability(weights) >= knowledge.guard.plain_share
        return Side.NONE if keeps_up else Side.PLAIN
    return Side.EASY if mean_pass_rate(weights) >= _EASY_FROM else Side.HARD


def _saved(knowledge: SamplingKnowledge, rules: SamplingRules, weights: Weights) -> float:
    return saved_by_probes(
        weights,
        probe_samples=rules.probe_samples,
        samples_per_group=rules.samples_per_group,
        price=knowledge.price,
    )


def _chosen_attempt(attempt: Attempt, side: Side, value: float, probability: float) -> Attempt:
    """Return an attempt after a choice; one that passed two counts for the harder side.

    Its worth there is taken times the probability of the other choice: so what the guard expects
    of w is what comes of both. It is exact where w enters one of the two; of two choices of the
    hard side the first is with w as it was then.
    """
    earlier_probability, together = attempt.probability, attempt.probability * probability
    if attempt.side is Side.HARD and side is Side.EASY:
        return replace(attempt, value=attempt.value * probability, probability=together)
    return replace(attempt, side=side, value=value * earlier_probability, probability=together)


def _uniform(seed: int, attempt: Attempt, purpose: str) -> float:
    """Return a number in [0, 1) of the attempt alone, so that a run repeats whatever the timing."""
    text = f"{seed}/{attempt.key}/{attempt.sequence}/{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
