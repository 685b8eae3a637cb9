"""A strategy at work: how many groups to start, which, and how many samples of each.

State without a clock or I/O; the reward service and the simulator drive the same object. Evidence
of ended groups is added when a version is announced, in the order of issue: so decisions do not
depend on which of two groups ended first, and a synchronous run whose batches are filled exactly
repeats.

`Rounds` is verl's dynamic sampling: waves of prompts, each awaited whole, until a batch is full.
One wave is `gen_batch_size` prompts. When all of its groups have ended and fewer than
`train_batch_size` are kept, another wave starts, up to `max_num_gen_batches` of them (0 or less: no
bound). When enough are kept, the first `train_batch_size` are trained and the surplus is thrown
away; the next wave starts under the new policy. (verl 0.6, `RayDAPOTrainer.fit`.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from sluice.algorithm.sampling.admission import FinishForecast, YieldEstimate, groups_to_admit
from sluice.algorithm.sampling.attempt import Attempt, AttemptEnd, PromptHistory, RememberedAttempt
from sluice.algorithm.sampling.choice import SamplingKnowledge, choose_attempt, choose_rest
from sluice.algorithm.sampling.coverage_guard import CoverageGuard, Side
from sluice.algorithm.sampling.pass_rates import GradeCounts, PassRateBelief
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.errors import BatchUnfillableError

_EXPLORED = (Side.EASY, Side.HARD)


class LoopLoad(NamedTuple):
    """Groups by where they are.

    `num_in_flight` started and did not end, `num_kept` wait for a batch, `num_in_training` are
    leased and their new policy is not announced yet; the fleet could take `capacity` more.
    `num_sure` of those in flight have a slot as if they were kept: their samples differ already,
    or they have a reserved slot (`staleness.reserves_slot`).
    """

    num_in_flight: int
    num_kept: int
    num_in_training: int
    capacity: int
    num_sure: int = 0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Waves started for the batch under way."""

    gen_batch_size: int
    train_batch_size: int
    max_num_gen_batches: int
    num_waves: int = 0
    num_issued: int = 0

    def after_issue(self) -> Rounds:
        """Return the state after one more prompt was issued; the first of a wave begins it."""
        if self.num_waves == 0 or self.num_issued >= self.gen_batch_size:
            return replace(self, num_waves=self.num_waves + 1, num_issued=1)
        return replace(self, num_issued=self.num_issued + 1)

    def after_return(self) -> Rounds:
        """Return the state after a prompt of the wave was cancelled; it will be issued again."""
        return replace(self, num_issued=max(0, self.num_issued - 1))

    def batch_formed(self) -> Rounds:
        """Return the state after the batch was formed: the next wave is another batch's first."""
        return replace(self, num_waves=0, num_issued=0)

    def has_ended(self, num_in_flight: int) -> bool:
        """Return whether the last wave is issued and all of its groups have ended."""
        is_admitted = self.num_waves > 0 and self.num_issued == self.gen_batch_size
        return is_admitted and num_in_flight == 0

    def num_to_issue(self, *, num_in_flight: int, num_kept: int, num_in_training: int) -> int:
        """Return how many prompts of the wave, or of a new one that is due, are still to be issued.

        Raises:
            BatchUnfillableError: the last wave that is allowed left the batch unfilled.
        """
        if num_in_training:
            return 0
        if self.num_waves and self.num_issued < self.gen_batch_size:
            return self.gen_batch_size - self.num_issued
        if num_in_flight or num_kept >= self.train_batch_size:
            return 0
        if 0 < self.max_num_gen_batches <= self.num_waves:
            # The first three sentences are verl's, for users who look for them in logs.
            raise BatchUnfillableError(
                f"num_gen_batches={self.num_waves} >= max_num_gen_batches="
                f"{self.max_num_gen_batches}. Generated too many. Please check if your data are "
                "too difficult. You could also try set max_num_gen_batches=0 to enable endless "
                f"trials. ({num_kept} of {self.train_batch_size} groups were kept; data may be too "
                "easy as well. Raise algorithm.filter_groups.max_num_gen_batches, set it to 0 for "
                "no bound, or choose sluice.sampling.strategy=stream)"
            )
        return self.gen_batch_size


class SamplingStrategy:
    """Decides for one run.

    Attributes:
        discards_surplus: whether kept groups beyond a batch are thrown away.
        preempts: whether a full batch cancels the groups that still run.
        estimate: of the yield.
        forecast: how long groups take.
    """

    def __init__(self, rules: SamplingRules) -> None:
        self.rules = rules
        # These are needed at every start, and follow from the rules.
        self.discards_surplus = rules.strategy is StrategyName.ROUNDS
        self._num_ahead = rules.num_ahead
        self._uses_memory = rules.strategy.uses_memory
        uses_probes = rules.strategy.uses_probes
        self._learns = uses_probes or self._uses_memory
        self.preempts = rules.preempts
        self._first_samples = rules.probe_samples if uses_probes else rules.samples_per_group
        self._rounds = Rounds(
            rules.gen_batch_size, rules.train_batch_size, rules.max_num_gen_batches
        )
        guard = CoverageGuard(rules.exploration, is_on=rules.coverage_guard)
        self._knowledge = SamplingKnowledge.of(PassRateBelief(), guard, rules.samples_per_group)
        self._ends: list[AttemptEnd] = []
        self._counts: Counter[str] = Counter()
        self.estimate = YieldEstimate()
        self.forecast = FinishForecast(rules.max_staleness)

    def resize(self, train_batch_size: int) -> None:
        """Fill batches of another size from here on: a source's share of a batch has changed."""
        self.rules = replace(self.rules, train_batch_size=train_batch_size)
        self._num_ahead = self.rules.num_ahead

    @property
    def num_in_line(self) -> int:
        """Prompts that `AdmissionOrder` weighs against each other for the next start; 1: none.

        With pacing, a batch of them. At least about one batch of groups starts per version, so
        hardly any prompt waits longer than that.
        """
        is_paced = self.rules.paces and self.rules.max_staleness > 0
        return self.rules.train_batch_size if is_paced else 1

    def num_to_start(self, load: LoopLoad) -> int:
        """Return how many groups to start now.

        Raises:
            BatchUnfillableError: ``rounds`` used up its waves.
        """
        if self.discards_surplus:
            num_wanted = self._rounds.num_to_issue(
                num_in_flight=load.num_in_flight,
                num_kept=load.num_kept,
                num_in_training=load.num_in_training,
            )
            return min(num_wanted, load.capacity)
        num_in_flight, num_kept, num_in_training, capacity, num_sure = load
        num_unsure = num_in_flight - num_sure
        return groups_to_admit(
            train_batch_size=self.rules.train_batch_size,
            max_staleness=self.rules.max_staleness,
            num_ahead=self._num_ahead,
            num_in_flight=num_unsure,
            num_kept=num_kept + num_sure,
            num_in_training=num_in_training,
            estimate=self.estimate,
            max_in_flight=num_unsure + capacity,
            fills_on_average=self.preempts,
        )

    def attempt(
        self, key: str, sequence: int, history: PromptHistory | None, version: int
    ) -> Attempt:
        """Decide about a prompt that was issued; `note_started` or `note_skipped` has to follow.

        Args:
            history: of its earlier attempts; ignored by strategies without memory.
        """
        if history is None or not self._uses_memory:
            return Attempt(key, sequence, None, self._first_samples)
        attempt = Attempt(key, sequence, history, self._first_samples)
        return choose_attempt(self._knowledge, self.rules, attempt, version)

    def note_started(self, attempt: Attempt) -> None:
        """Note that the group of an attempt starts."""
        if self.discards_surplus:
            self._rounds = self._rounds.after_issue()
        self._counts["visits"] += 1
        self._counts["explored"] += attempt.side in _EXPLORED

    def note_skipped(self, attempt: Attempt) -> None:
        """Note that a prompt was skipped."""
        self._counts["skipped"] += 1
        self._counts[f"skipped_{attempt.side}"] += 1

    def note_restarted(self, attempt: Attempt) -> None:
        """Note that a group was cancelled and its prompt waits for another attempt."""
        if self.discards_surplus:
            self._rounds = self._rounds.after_return()
        self._counts["visits"] -= 1
        self._counts["explored"] -= attempt.side in _EXPLORED

    def after_probes(
        self, attempt: Attempt, *, num_right: int, num_scored: int, version: int
    ) -> Attempt | None:
        """Decide about the rest of a group; ``None``: it ends here as filtered."""
        continued = choose_rest(
            self._knowledge,
            self.rules,
            attempt,
            num_right=num_right,
            num_scored=num_scored,
            version=version,
        )
        if continued is None:
            self._counts["stopped"] += 1
            self._counts["stopped_easy" if num_right else "stopped_hard"] += 1
        return continued

    def note_ended(
        self,
        attempt: Attempt,
        *,
        num_right: int,
        num_scored: int,
        mean_tokens: float,
        is_kept: bool,
        version: int,
        seconds: float,
    ) -> None:
        """Note a group that was kept, filtered, or stopped after its probes. Not for failed groups.

        Args:
            attempt: as `after_probes` returned it, if it continued.
            is_kept: whether it waits for a batch.
            seconds: since it was admitted.
        """
        self.estimate = self.estimate.observe(is_kept)
        if num_scored == self.rules.samples_per_group:
            self.forecast.note_ended(attempt.key, mean_tokens=mean_tokens, seconds=seconds)
        if self._learns:
            grade_counts = GradeCounts(float(num_right), float(num_scored - num_right))
            self._ends.append(AttemptEnd(attempt, grade_counts, mean_tokens, is_kept, version))

    def may_form(self, num_in_flight: int) -> bool:
        """Return whether a full batch may be taken from the kept groups."""
        return not self.discards_surplus or self._rounds.has_ended(num_in_flight)

    def batch_formed(self) -> None:
        """Note that a batch was taken from the kept groups."""
        if self.discards_surplus:
            self._rounds = self._rounds.batch_formed()

    def new_version(self) -> list[tuple[str, RememberedAttempt]]:
        """Learn from the groups that ended since the version before.

        Returns:
            what to add to the histories (`update_history`), by key and in order; none without
            memory.
        """
        if not self._learns:
            return []
        ends, self._ends = sorted(self._ends, key=lambda end: end.attempt.sequence), []
        self._knowledge = self._knowledge.after(ends, self.rules.samples_per_group)
        if not self._uses_memory:
            return []
        return [(end.attempt.key, _remembered_attempt(end)) for end in ends]

    def statistics(self) -> dict[str, float]:
        """Return gauges and counts since the start, by metric name."""
        gauges = {"sampling/yield": self.estimate.mean}
        if self._learns:
            gauges |= _knowledge_metrics(self._knowledge)
            gauges |= {
                f"sampling/{name}": float(self._counts[name])
                for name in (
                    *("visits", "explored", "skipped"),
                    *("skipped_easy", "skipped_plain", "skipped_hard"),
                    *("stopped", "stopped_easy", "stopped_hard"),
                )
            }
        return gauges


def _remembered_attempt(end: AttemptEnd) -> RememberedAttempt:
    num_right, num_wrong = int(end.grade_counts.num_right), int(end.grade_counts.num_wrong)
    return RememberedAttempt(num_right, num_right + num_wrong, end.mean_tokens, end.version)


def _knowledge_metrics(knowledge: SamplingKnowledge) -> dict[str, float]:
    guard = knowledge.guard
    return {
        "sampling/price": knowledge.price,
        "sampling/hard_share": guard.share,
        "sampling/hard_share_plain": guard.plain_share,
        "sampling/hard_share_ratio": guard.ratio,
        "sampling/draw_probability_easy": guard.probability(Side.EASY),
        "sampling/draw_probability_plain": guard.probability(Side.PLAIN),
        "sampling/draw_probability_hard": guard.probability(Side.HARD),
    }
