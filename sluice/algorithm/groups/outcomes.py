"""Decide what happens to a sample without a score: one rule for each kind of failure.

A failure never becomes a number. A sample that ended without a score is scored again, generated
again, left out of its group, or fails the whole group; the first two a bounded number of times. A
group is trained on its scored samples alone, if enough of them are left (`filter.fewest_samples`).

Whether tokens are too old for a batch is decided for whole groups, in `staleness`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.types import Failed, FailureKind, Outcome


class OutcomeAction(StrEnum):
    """What may be done about a sample without a score."""

    SCORE_AGAIN = "score_again"
    GENERATE_AGAIN = "generate_again"
    LEAVE_OUT = "leave_out"
    DROP_GROUP = "drop_group"


FINAL_ACTIONS = frozenset({OutcomeAction.LEAVE_OUT, OutcomeAction.DROP_GROUP})
"""Those that end a sample."""

RESPONDED = frozenset(
    {FailureKind.UNSCORABLE, FailureKind.SCORER_TIMEOUT, FailureKind.SCORER_CRASH}
)
"""Failures of samples that have a response, so that another look or another draw may help."""

STRIKING_KINDS = frozenset(
    {FailureKind.SCORER_TIMEOUT, FailureKind.SCORER_CRASH, FailureKind.ENGINE_ERROR}
)
"""Failures that cost others time: a scorer process, or a replica's engine."""


@dataclass(frozen=True, slots=True)
class OutcomeRule:
    """What is done about failures of one kind.

    Args:
        action: at first.
        max_attempts: how often the sample is scored (or generated) in all, if `action` repeats it.
        then: what is done after the last attempt; a final action.

    Raises:
        ValueError: `max_attempts` is below 1, or `then` is not final.
    """

    action: OutcomeAction = OutcomeAction.LEAVE_OUT
    max_attempts: int = 1
    then: OutcomeAction = OutcomeAction.LEAVE_OUT

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.then not in FINAL_ACTIONS:
            raise ValueError(f"no rule ends with {self.max_attempts} attempts, then {self.then}")

    @property
    def final(self) -> OutcomeAction:
        """What is done once nothing is tried any more."""
        return self.action if self.action in FINAL_ACTIONS else self.then

    def after(self, attempts: int) -> OutcomeAction:
        """What is done about a sample that failed after `attempts` >= 1 of what is tried again."""
        return self.final if attempts >= self.max_attempts else self.action


LEFT_OUT = OutcomeRule()


@dataclass(frozen=True, slots=True)
class OutcomePolicy:
    """The rules of a run; kinds without one are left out.

    Args:
        rules: by kind of failure.

    Raises:
        ValueError: a rule asks for another look at, or another draw of, what has no response:
            aborted samples are never repeated, and the engine's failures count by group.
    """

    rules: Mapping[FailureKind, OutcomeRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, rule in self.rules.items():
            if kind not in RESPONDED and rule.action not in FINAL_ACTIONS:
                raise ValueError(f"{kind}: {rule.action} asks for a response, and there is none")

    def rule(self, kind: FailureKind) -> OutcomeRule:
        """The rule for failures of a kind."""
        return self.rules.get(kind, LEFT_OUT)

    def to_score_again(self, outcomes: Sequence[Outcome], attempts: int) -> tuple[int, ...]:
        """Places in `outcomes` that are scored once more, after so many attempts at each."""
        return self._with_action(outcomes, attempts, OutcomeAction.SCORE_AGAIN)

    def to_generate_again(self, outcomes: Sequence[Outcome], attempts: int) -> tuple[int, ...]:
        """Return the indexes in `outcomes` to generate again, after so many rounds for each."""
        return self._with_action(outcomes, attempts, OutcomeAction.GENERATE_AGAIN)

    def decisive(self, outcomes: Sequence[Outcome]) -> Failed | None:
        """The first failure that costs the whole group; ``None``: none does.

        All attempts are over.
        """
        return next((o for o in _failed(outcomes) if self._drops(o)), None)

    def _drops(self, failed: Failed) -> bool:
        return self.rule(failed.kind).final is OutcomeAction.DROP_GROUP

    def _with_action(
        self, outcomes: Sequence[Outcome], attempts: int, action: OutcomeAction
    ) -> tuple[int, ...]:
        return tuple(
            place
            for place, outcome in enumerate(outcomes)
            if isinstance(outcome, Failed) and self.rule(outcome.kind).after(attempts) is action
        )


def striking(outcomes: Collection[Outcome], *, engine_answered: bool = True) -> Failed | None:
    """The first failure that counts against the prompt; ``None``: there is none.

    Args:
        outcomes: of the group's samples.
        engine_answered: whether a replica answered with an error of its engine. If none did,
            replicas were lost or stood still, which says nothing about the prompt.
    """
    kinds = STRIKING_KINDS if engine_answered else STRIKING_KINDS - {FailureKind.ENGINE_ERROR}
    return next((o for o in _failed(outcomes) if o.kind in kinds), None)


def is_quarantined(strikes: int, max_strikes: int | None) -> bool:
    """Return whether a prompt with so many strikes in a row starts no more; ``None``: never.

    An attempt is a strike if its group failed with at least one striking failure. A group
    that comes to any other end of its own takes the strikes before it back, so that trouble which
    meets all prompts now and then does not add up. One that is broken off (too old, or by another
    trainer) says nothing.
    """
    return max_strikes is not None and strikes >= max_strikes


def _failed(outcomes: Collection[Outcome]) -> tuple[Failed, ...]:
    return tuple(outcome for outcome in outcomes if isinstance(outcome, Failed))
