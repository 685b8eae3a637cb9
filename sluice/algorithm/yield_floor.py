"""When a yield is hopeless: too few of the last groups were kept.

The reward service and the simulator judge by the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.errors import BatchUnfillableError

DEFAULT_MIN_YIELD, DEFAULT_NUM_GROUPS = 0.005, 2000
"""Those of `algorithm.filter_groups.min_yield` and `min_yield_groups`."""
REMEDY = (
    "choose prompts the policy solves sometimes, draw more samples (actor_rollout_ref.rollout.n), "
    "or lower min_yield (raise max_num_gen_batches if that was given)"
)


@dataclass(frozen=True, slots=True)
class LastGroups:
    """Which of the last groups were kept, of those that ended as kept, filtered or failed.

    Args:
        num_groups: how many these are.
        kept: a bit for each, the newest lowest; 1: it was kept.
    """

    num_groups: int = 0
    kept: int = 0

    @property
    def share(self) -> float:
        """Kept ones of all, in [0, 1]; 1 where there is none."""
        return self.kept.bit_count() / self.num_groups if self.num_groups else 1.0


@dataclass(frozen=True, slots=True)
class YieldFloor:
    """The bound below which a run gives up.

    Args:
        min_yield: least share of kept groups, in [0, 1]; 0: no bound.
        num_groups: how many of the last groups the share is taken over, at least 1.
    """

    min_yield: float = DEFAULT_MIN_YIELD
    num_groups: int = DEFAULT_NUM_GROUPS

    def after(self, last: LastGroups, *, is_kept: bool) -> LastGroups:
        """The last groups once another one has ended."""
        num_groups = min(last.num_groups + 1, self.num_groups)
        within = (1 << self.num_groups) - 1
        return LastGroups(num_groups, (last.kept << 1 | is_kept) & within)

    def is_hopeless(self, last: LastGroups) -> bool:
        """Whether too few of the last groups were kept; fewer than `num_groups` say nothing."""
        return last.num_groups >= self.num_groups and last.share < self.min_yield

    def error(
        self, last: LastGroups, summary: str = "", remedy: str = REMEDY
    ) -> BatchUnfillableError:
        """What giving up says.

        The first words are verl's, which its users look for in a log (verl-semantics, filtering).

        Args:
            last: groups that ended.
            story: what else is known of them; follows the numbers.
            remedy: what may help.
        """
        return BatchUnfillableError(
            f"Generated too many groups for those kept: only {last.share:.2%} of the last "
            f"{self.num_groups} groups were kept, below "
            f"algorithm.filter_groups.min_yield = {self.min_yield:g}{summary}; {remedy}"
        )
