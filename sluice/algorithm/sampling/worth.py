"""Whether a prompt, or the rest of a group, is worth its samples.

A group is trained only if it is mixed: then all n samples are. Drawing prompts as they come, m of
whose groups are mixed on average, costs ``1 / m`` samples for each that is trained. That is the
price: what costs more is better spent on the next prompt. With P the probability that a group will
be mixed, given what is known of it, and k samples drawn already, the rest is worth drawing if

    (n - k) <= n * P / m

A visit is worth it if what it is expected to cost, probes included, is at most what it is expected
to train, times the price. Lengths cancel out: a prompt's trained samples are as long as those that
are drawn for it. Prices above plain drawing's are paid by nobody; below them everybody is drawn
(but for what the coverage guard leaves out), so that the choice does not run away towards the few
prompts that are mixed for sure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice.algorithm.sampling.pass_rates import (
    GradeCounts,
    Weights,
    all_right_probability,
    all_wrong_probability,
    mixed_probability,
    posterior,
)

CERTAIN_GROUPS_PRICE = 1.0


def plain_price(population: Weights, samples_per_group: int) -> float:
    """Samples drawn for each that is trained when prompts are drawn as they come; at least 1."""
    mixed = mixed_probability(population, samples_per_group)
    return max(CERTAIN_GROUPS_PRICE, 1.0 / max(mixed, 1e-6))


@dataclass(frozen=True, slots=True)
class Stakes:
    """What may still come of a visit, in samples."""

    cost: float
    gain: float

    def value(self, price: float) -> float:
        """What is expected to be trained, times the price, over what is expected to be drawn.

        From 1 on the samples to be trained are had at no more than `price` each.
        """
        return self.gain * price / self.cost


def rest_of_group(
    before_probes: Weights,
    *,
    num_right: int,
    num_probes: int,
    num_rest: int,
    samples_per_group: int,
) -> Stakes:
    """The rest of a group whose probes were all right or all wrong.

    Args:
        before_probes: weights of the grid for its prompt before them.
        num_right: right probes: all or none.
        num_probes: graded probes.
        num_rest: samples that are not drawn yet.
        samples_per_group: n.
    """
    grade_counts = GradeCounts(float(num_right), float(num_probes - num_right))
    after = posterior(before_probes, grade_counts)
    stays_uniform = all_right_probability if num_right else all_wrong_probability
    mixed = 1.0 - stays_uniform(after, num_rest)
    return Stakes(float(num_rest), samples_per_group * mixed)


def whole_attempt(
    weights: Weights, *, probe_samples: int | None, samples_per_group: int, price: float
) -> Stakes:
    """A visit to a prompt, its probes included.

    Args:
        weights: weights of the grid for the prompt.
        probe_samples: samples drawn first; ``None``: all at once.
        samples_per_group: n.
        price: decides whether groups with uniform probes go on.
    """
    n = samples_per_group
    if probe_samples is None:
        return Stakes(float(n), n * mixed_probability(weights, n))
    rest = n - probe_samples
    is_mixed = mixed_probability(weights, probe_samples)
    cost, gain = probe_samples + rest * is_mixed, n * is_mixed
    for chance, stakes in _uniform_probes(weights, probe_samples, n):
        if stakes.value(price) >= 1.0:
            cost, gain = cost + chance * stakes.cost, gain + chance * stakes.gain
    return Stakes(cost, gain)


def saved_by_probes(
    weights: Weights, *, probe_samples: int, samples_per_group: int, price: float
) -> float:
    """Samples that probes are expected to save, by stopping groups whose rest is not worth them."""
    return sum(
        chance * stakes.cost
        for chance, stakes in _uniform_probes(weights, probe_samples, samples_per_group)
        if stakes.value(price) < 1.0
    )


def _uniform_probes(
    weights: Weights, probe_samples: int, samples_per_group: int
) -> Iterator[tuple[float, Stakes]]:
    """How likely probes are all right, and what is then at stake; then the same for all wrong."""
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
