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
from sluice.algorithm.sampling.visit import Visit, VisitEnd
from sluice.algorithm.sampling.worth import (
    plain_price,
    rest_of_group,
    saved_by_probes,
    whole_visit,
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

    def after(self, ends: list[VisitEnd], samples_per_group: int) -> Knowledge:
        """What is known once these groups have ended."""
        guard = self.guard
        seen = []
        for end in ends:
            evidence = end.visit.known(end.version) + end.evidence
            seen.append((evidence, 1.0 / end.visit.draw_probability))
            if end.kept:
                hardness = hard_probability(posterior(self.population, evidence))
                visit = end.visit
                guard = guard.kept(
                    visit.side,
                    hardness=hardness,
                    worth=visit.worth,
                    probability=visit.probability,
                )
        return Knowledge.of(self.belief.learn(seen), guard, samples_per_group)


def choose_visit(knowledge: Knowledge, rules: SamplingRules, visit: Visit, version: int) -> Visit:
    """Draw a known prompt or pass it by, by what earlier visits showed; with probes or without.

    Probes cost time, since the rest of a group starts later. They are left out where they would
    save fewer than `_LEAST_SAVING` samples.
    """
    weights = posterior(knowledge.population, visit.known(version))
    n = rules.samples_per_group
    if rules.strategy.uses_probes and _saved(knowledge, rules, weights) < _LEAST_SAVING:
        visit = replace(visit, first_samples=n)
    stakes = whole_visit(
        weights,
        probe_samples=None if visit.first_samples == n else rules.probe_samples,
        samples_per_group=n,
        price=knowledge.price,
    )
    worth = stakes.worth(knowledge.price)
    side = _side(knowledge, weights, worth)
    if side is Side.SURE:
        return visit
    probability = knowledge.guard.probability(side, worth)
    chosen = replace(_passed(visit, side, worth, probability), draw_probability=probability)
    is_drawn = _uniform(rules.seed, visit, "visit") < probability
    return chosen if is_drawn else replace(chosen, first_samples=0)


def choose_rest(
    knowledge: Knowledge,
    rules: SamplingRules,
    visit: Visit,
    *,
    num_right: int,
    num_scored: int,
    version: int,
) -> Visit | None:
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
        return visit
    before = posterior(knowledge.population, visit.known(version))
    stakes = rest_of_group(
        before,
        num_right=num_right,
        num_probes=num_scored,
        num_rest=rules.samples_per_group - visit.first_samples,
        samples_per_group=rules.samples_per_group,
    )
    worth = stakes.worth(knowledge.price)
    if worth >= 1.0:
        return visit
    side = Side.EASY if num_right else Side.HARD
    # Exploration bounds what comes of both choices, or a group might stand for a hundred others.
    least = min(1.0, rules.exploration / visit.probability)
    probability = max(least, knowledge.guard.probability(side, worth))
    is_drawn = _uniform(rules.seed, visit, "rest") < probability
    return _passed(visit, side, worth, probability) if is_drawn else None


def _side(knowledge: Knowledge, weights: Weights, worth: float) -> Side:
    if worth >= 1.0:
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


def _passed(visit: Visit, side: Side, worth: float, probability: float) -> Visit:
    """A group that passed two choices counts for the harder side.

    Its worth there is taken times the probability of the other choice: so what the guard expects
    of w is what comes of both. It is exact where w enters one of the two; of two choices of the
    hard side the first is with w as it was then.
    """
    before, together = visit.probability, visit.probability * probability
    if visit.side is Side.HARD and side is Side.EASY:
        return replace(visit, worth=visit.worth * probability, probability=together)
    return replace(visit, side=side, worth=worth * before, probability=together)


def _uniform(seed: int, visit: Visit, purpose: str) -> float:
    """A number in [0, 1) of the visit alone, so that a run repeats whatever the timing."""
    text = f"{seed}/{visit.key}/{visit.sequence}/{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
