"""verl's dynamic sampling: waves of prompts, each awaited whole, until a batch is full.

One wave is `gen_batch_size` prompts. When all of its groups have ended and fewer than
`train_batch_size` are kept, another wave starts, up to `max_num_gen_batches` of them (0 or less:
no bound). When enough are kept, the first `train_batch_size` are trained and the surplus is thrown
away; the next wave starts under the new policy. (verl 0.6, `RayDAPOTrainer.fit`.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice.errors import BatchUnfillableError


@dataclass(frozen=True, slots=True)
class Rounds:
    """Waves started for the batch under way.

    Args:
        gen_batch_size: prompts of a wave.
        train_batch_size: groups of a batch.
        max_num_gen_batches: most waves for one batch; 0 or less: no bound.
        num_waves: waves begun.
        num_issued: prompts of the last wave that were issued.
    """

    gen_batch_size: int
    train_batch_size: int
    max_num_gen_batches: int
    num_waves: int = 0
    num_issued: int = 0

    def issued(self) -> Rounds:
        """Return the state after one more prompt was issued; the first of a wave begins it."""
        if self.num_waves == 0 or self.num_issued >= self.gen_batch_size:
            return replace(self, num_waves=self.num_waves + 1, num_issued=1)
        return replace(self, num_issued=self.num_issued + 1)

    def gave_back(self) -> Rounds:
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
