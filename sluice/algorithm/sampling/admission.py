"""How many new groups to start now, and which first (docs/sampling.md, "Stream" and "Staleness").

A group started under version v may be trained in the batches of v, ..., v + S. Of batches of B
groups, A groups generated ahead are wanted. Groups start while both hold:

    kept + upper bound on how many of those in flight will be kept <= (S + 1) * B - in training
    kept + mean of how many of those in flight will be kept < B + A - in training

The first ensures that every kept group has its slot; the second may err.

Where a run at S = 0 has to repeat, the bound is all of those in flight, and a prompt starts only if
all before it, were they all kept, would leave a batch unfilled. So the prompts issued for a batch
are the shortest run of the stream that yields B kept groups. Where a run at S = 0 need not repeat,
``(B - kept) / mean yield`` groups run. At S >= 1 the bound is ``mean + Z * sd`` of a binomial whose
rate is itself an upper confidence limit, since groups that end early are not typical of those still
running (short answers are more often all right).

State without I/O; the reward service and the simulator drive the same objects, each with its clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import lru_cache

from sluice.errors import BatchUnfillableError

Z = 3.0
"""Standard errors, and standard deviations, by which the bound on kept groups errs upwards."""
_KEPT_OF_YIELD = 0.98  # the weight of the past at each group: about 50 are remembered
_ROUNDING = 1e-9

DEFAULT_MIN_YIELD, DEFAULT_NUM_GROUPS = 0.005, 2000
"""The values of `algorithm.filter_groups.min_yield` and `min_yield_groups`."""

_KEPT_OF_RATE, _KEPT_OF_LENGTH, _KEPT_OF_INTERVAL = 0.98, 0.98, 0.8
KNOWN_LENGTHS = 65_536
"""Prompts whose lengths a forecast remembers."""
_VERSIONS_PASSED_BY = 2
_STEPS_PER_OCTAVE = 8

REMEDY = (
    "choose prompts the policy solves sometimes, sample more (actor_rollout_ref.rollout.n), "
    "or lower min_yield (raise max_num_gen_batches if that was given)"
)


@dataclass(frozen=True, slots=True)
class YieldEstimate:
    """Share of ended groups that were kept, recent ones weighing more.

    Starts at the prior (a yield of 1 worth eight observations): the first admissions of a run are
    as careful as at S = 0 and open up as filtered groups are seen.

    Args:
        prior_yield: yield assumed before anything is seen, above 0 and at most 1.
        prior_weight: how many observations the prior is worth; it never decays, so the estimate
            never reaches 0 and admission never grows without bound.
    """

    prior_yield: float = 1.0
    prior_weight: float = 8.0
    kept_weight: float = 0.0
    observed_weight: float = 0.0

    def observe(self, is_kept: bool) -> YieldEstimate:
        """Return the estimate after one more group ended, kept or filtered."""
        return replace(
            self,
            kept_weight=_KEPT_OF_YIELD * self.kept_weight + float(is_kept),
            observed_weight=_KEPT_OF_YIELD * self.observed_weight + 1.0,
        )

    @property
    def mean(self) -> float:
        """Expected yield, in (0, 1]."""
        kept_weight = self.kept_weight + self.prior_yield * self.prior_weight
        return kept_weight / (self.observed_weight + self.prior_weight)

    def upper(self) -> float:
        """Return the upper confidence limit of the yield, `Z` standard errors above the mean."""
        mean = self.mean
        # The sum of decaying weights is about half their effective number: errs upwards.
        variance = max(mean * (1.0 - mean), 0.0) / (self.observed_weight + self.prior_weight)
        return min(1.0, mean + Z * math.sqrt(variance))


def kept_upper_bound(num_groups: int, estimate: YieldEstimate) -> float:
    """Return how many of `num_groups` running groups may be kept: mean and `Z` sd, at most all."""
    rate = estimate.upper()
    spread = math.sqrt(num_groups * rate * (1.0 - rate))
    return min(float(num_groups), num_groups * rate + Z * spread)


def groups_to_admit(  # noqa: PLR0913 - the loop, as far as it matters
    *,
    train_batch_size: int,
    max_staleness: int,
    num_in_flight: int,
    num_kept: int,
    num_in_training: int,
    estimate: YieldEstimate,
    max_in_flight: int,
    num_ahead: int | None = None,
    fills_on_average: bool = False,
) -> int:
    """Return the number of groups to start now, >= 0.

    Args:
        train_batch_size: B, groups in a train batch.
        max_staleness: S, versions a group may be behind when it is trained.
        num_in_flight: groups started and not yet ended.
        num_kept: kept groups waiting for a batch.
        num_in_training: groups leased to the trainer whose new policy is not yet announced.
        estimate: the yield seen so far; ignored at S = 0 unless `fills_on_average`.
        max_in_flight: absolute bound from the fleet's capacity: more would only age in a queue.
        num_ahead: A, how many kept groups beyond a batch are wanted; ``None``: as many as fit.
        fills_on_average: at S = 0, start the groups expected to be needed, not only those certain
            to be needed.
    """
    filled = num_in_training + num_kept
    capacity = (max_staleness + 1) * train_batch_size - filled
    if max_staleness > 0:
        max_groups = max_groups_in_flight(capacity, estimate)
    else:
        max_groups = math.ceil(capacity / estimate.mean) if fills_on_average else capacity
    if num_ahead is not None:
        num_wanted = math.ceil((train_batch_size + num_ahead - filled) / estimate.mean)
        max_groups = min(max_groups, num_wanted)
    return max(0, min(max_groups, max_in_flight) - num_in_flight)


@lru_cache(maxsize=4096)  # called at every event, while estimate and capacity change at few
def max_groups_in_flight(capacity: int, estimate: YieldEstimate) -> int:
    """Return the most running groups n whose `kept_upper_bound` is at most `capacity`; 0 for none.

    With ``x = sqrt(n)`` the bound ``r x^2 + Z sqrt(r (1 - r)) x`` is a parabola, whose larger root
    is at `capacity`.
    """
    if capacity <= 0:
        return 0
    rate = estimate.upper()
    half = Z * math.sqrt(rate * (1.0 - rate)) / 2.0
    root = (math.sqrt(half * half + rate * capacity) - half) / rate
    return max(capacity, math.floor(root * root + _ROUNDING))


def groups_with_capacity(num_free: int, *, first_sequences: int, is_idle: bool) -> int:
    """Return how many groups the fleet can take, by the sequences of each group's first request.

    No capacity is kept free for the later requests of a group with probes: they wait, and are
    served before groups that start.

    Args:
        num_free: sequences that could start, less those that wait already; below 0 if more wait
            than fit.
        first_sequences: sequences of a group's first request, at least 1.
        is_idle: whether no group is in flight. Then one fits wherever a sequence does: a group
            larger than a replica must run as well.

    Returns:
        at least 0.
    """
    capacity = max(0, num_free // first_sequences)
    return max(1, capacity) if is_idle and num_free > 0 else capacity


@dataclass(frozen=True, slots=True)
class YieldFloor:
    """The bound on the yield below which a run gives up, and a simulated run as well.

    Args:
        min_yield: least share of kept groups, in [0, 1]; 0: no bound.
        num_groups: how many of the last groups the share is taken over, at least 1.
    """

    min_yield: float = DEFAULT_MIN_YIELD
    num_groups: int = DEFAULT_NUM_GROUPS

    def is_hopeless(self, num_kept: int, num_ended: int) -> bool:
        """Return whether too few of the last groups were kept; not while fewer have ended.

        Those count that ended as kept, filtered or failed.
        """
        return num_ended >= self.num_groups and num_kept / num_ended < self.min_yield

    def error(self, num_kept: int, summary: str = "", remedy: str = REMEDY) -> BatchUnfillableError:
        """Return the error of a run that gives up.

        It begins with verl's words (`recipe/dapo/dapo_ray_trainer.py`), for users who search logs.
        """
        return BatchUnfillableError(
            f"Generated too many groups for those kept: only {num_kept / self.num_groups:.2%} of "
            f"the last {self.num_groups} groups were kept, below "
            f"algorithm.filter_groups.min_yield = {self.min_yield:g}{summary}; {remedy}"
        )


@dataclass(slots=True)
class _Average:
    """A mean that weighs recent values more; `kept` is the weight of the past."""

    kept: float
    value: float | None = None

    def see(self, value: float) -> None:
        past = value if self.value is None else self.value
        self.value = self.kept * past + (1.0 - self.kept) * value


class FinishForecast:
    """How long groups take, and how much time is left for those that start now.

    Args:
        max_staleness: S >= 0.
    """

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._interval_s = _Average(_KEPT_OF_INTERVAL)
        self._s_per_token = _Average(_KEPT_OF_RATE)
        self._tokens = _Average(_KEPT_OF_LENGTH)
        self._lengths: OrderedDict[str, float] = OrderedDict()
        self._announced_s: float | None = None

    def note_announced(self, now_s: float) -> None:
        """Note that a version was announced."""
        if self._announced_s is not None:
            self._interval_s.see(now_s - self._announced_s)
        self._announced_s = now_s

    def note_ended(self, key: str, *, mean_tokens: float, seconds: float) -> None:
        """Note that a group ended: its samples' mean tokens, and the seconds since its start."""
        if mean_tokens <= 0.0:
            return
        self.remember(key, mean_tokens)
        self._s_per_token.see(seconds / mean_tokens)

    def remember(self, key: str, mean_tokens: float) -> None:
        """Remember the mean tokens of a prompt's samples; forget the oldest of too many."""
        self._lengths[key] = mean_tokens
        self._lengths.move_to_end(key)
        if len(self._lengths) > KNOWN_LENGTHS:
            self._lengths.popitem(last=False)
        self._tokens.see(mean_tokens)

    def tokens(self, key: str) -> float:
        """Mean response length to expect of a prompt: as in its last attempt, else as of all."""
        return self._lengths.get(key, self._tokens.value or 0.0)

    def tokens_in_time(self, now_s: float) -> float | None:
        """Mean response length of a group that would just end in time; ``None``: not known yet."""
        interval_s, s_per_token = self._interval_s.value, self._s_per_token.value
        if self._announced_s is None or interval_s is None or not s_per_token:
            return None
        end_s = self._announced_s + self._max_staleness * interval_s
        return (end_s - now_s) / s_per_token


class AdmissionOrder:
    """Prompts next in line, by expected length to an eighth of an octave (9 %)."""

    def __init__(self) -> None:
        self._line: dict[int, tuple[int, int]] = {}  # by sequence: length step, version

    def __len__(self) -> int:
        return len(self._line)

    def add(self, sequence: int, expected_tokens: float, version: int) -> None:
        """Put the prompt `sequence` into the line, from `version` on."""
        self._line[sequence] = _length_step(expected_tokens), version

    def take(self, version: int, tokens_in_time: float | None) -> int:
        """Return the sequence of the prompt to start now, which leaves the line; there must be one.

        Args:
            tokens_in_time: see `FinishForecast`; ``None``: in their order of arrival.
        """
        sequence, (_, since) = next(iter(self._line.items()))
        if version < since:  # a trainer went back to an older policy: the wait begins again
            self._line = {s: (step, min(v, version)) for s, (step, v) in self._line.items()}
            since = version
        if tokens_in_time is not None and version - since < _VERSIONS_PASSED_BY:
            steps = {step for step, _ in self._line.values()}
            max_step = _length_step(tokens_in_time)
            chosen_step = max((step for step in steps if step <= max_step), default=min(steps))
            # Of equally long ones the first in line.
            sequence = next(s for s, (step, _) in self._line.items() if step == chosen_step)
        del self._line[sequence]
        return sequence

    def clear(self) -> None:
        """Remove all prompts from the line."""
        self._line.clear()


def _length_step(tokens: float) -> int:
    return int(_STEPS_PER_OCTAVE * math.log2(1.0 + tokens)) if tokens > 0.0 else 0
