"""The ages of kept and running groups, counted by version as they change.

State without a clock or I/O, for the reward service and the simulator alike. Every start, end and
kept group may leave something to decide, and thousands of groups may be running: so they are held
by version, where the rules of `staleness` see their numbers without a look at each.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.algorithm.staleness import BatchDecision, OnStale, expired_groups, may_form_batch


class GroupAges:
    """Kept and running groups of one run, by prompt id.

    The two are told apart only by who tells: a group may be both, between being kept and the end
    of its task. Of those that run, some claim a place, from before they hold tokens until they end.

    Args:
        batch_size: B >= 1, groups in a batch.
        max_staleness: S >= 0.
        on_stale: ``wait`` or ``drop``, see `staleness`.
    """

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._on_stale: OnStale = on_stale
        self._kept = _ByVersion()
        self._running = _ByVersion()
        self._reserved = _ByVersion()  # of those that run, whose place is certain

    def keep(self, prompt_id: str, oldest_version: int, sequence: int) -> None:
        """A group waits for a batch.

        Args:
            prompt_id: names it.
            oldest_version: of its tokens.
            sequence: its place among groups of that version; the lowest is taken first.
        """
        self._kept.put(prompt_id, oldest_version, sequence)
        self._reserved.take(prompt_id)  # its task may not have ended; it takes one place, not two

    def remove(self, prompt_id: str) -> None:
        """A kept group waits no more; harmless if it does not."""
        self._kept.take(prompt_id)

    def remove_all(self) -> None:
        """No kept group waits any more."""
        self._kept = _ByVersion()

    def reserve(self, prompt_id: str, version: int) -> None:
        """A group's place in the batch for `version` is certain until it leaves (`withdrawals`),
        whether or not it holds tokens yet."""
        self._reserved.put(prompt_id, version)

    def runs(self, prompt_id: str, start_version: int) -> None:
        """A group's tokens are of `start_version` or later: it starts, or starts over."""
        has_reservation = prompt_id in self._reserved.versions
        (self._reserved if has_reservation else self._running).put(prompt_id, start_version)

    def pauses(self, prompt_id: str) -> None:
        """A group holds no tokens any more; what it claims remains. Harmless if it held none."""
        self._running.take(prompt_id)

    def left(self, prompt_id: str) -> None:
        """A group runs no more; harmless if it did not."""
        self._running.take(prompt_id)
        self._reserved.take(prompt_id)

    def decide(self, version: int, kept_bound: Callable[[int], float] = float) -> BatchDecision:
        """What to do now towards the batch for `version` (`staleness.may_form_batch`)."""
        return may_form_batch(
            self._kept.groups,
            self._running.groups,
            version=version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
            on_stale=self._on_stale,
            kept_bound=kept_bound,
            reserved=self._reserved.groups,
        )

    def expired(self, next_version: int) -> tuple[str, ...]:
        """Running groups without a place from `next_version` on (`staleness.doomed_groups`)."""
        return expired_groups(
            self._kept.groups,
            self._running.groups,
            next_version=next_version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
            reserved=self._reserved.groups,
        )

    def drops(self, prompt_id: str, next_version: int) -> bool:
        """Whether a doomed group is dropped for its age; if not, it begins again.

        Raises:
            KeyError: the group is not running, or claims its place (such a one begins again).
        """
        is_too_old = self._running.versions[prompt_id] < next_version - self._max_staleness
        return self._on_stale == "drop" and is_too_old


class _ByVersion:
    """Groups by version (no version without one), and the version of each."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[str, int]] = {}  # version -> prompt id -> sequence
        self.versions: dict[str, int] = {}

    def put(self, prompt_id: str, version: int, sequence: int = 0) -> None:
        if prompt_id in self.versions:
            self.take(prompt_id)
        self.versions[prompt_id] = version
        same_age = self.groups.get(version)
        if same_age is None:
            same_age = self.groups[version] = {}
        same_age[prompt_id] = sequence

    def take(self, prompt_id: str) -> None:
        version = self.versions.pop(prompt_id, None)
        if version is None:
            return
        same_age = self.groups[version]
        del same_age[prompt_id]
        if not same_age:
            del self.groups[version]
