"""A group with its state, attempt and result; the table of all groups; and their events.

A `Group` exists from the acceptance of a prompt until the prompt ends, through all attempts. Each
event is a method of `GroupTable`, which changes the ledger, then the group and the counts, and then
notifies the observers.

event      from                               to          what happened
accepted   -                                  waiting     a client's prompt, a data-set row, or a
                                                          pending prompt of an earlier process
admitted   waiting                            generating  an attempt starts, in a task of its own
generated  generating                         generating  the samples of a request have come
                                              grading     ... and no other request is under way
graded     generating, grading                the same    some samples have their outcomes
continued  generating, grading                generating  more samples are requested
kept       grading                            kept        the group waits for a train batch
leased     kept                               leased      the trainer has the batch
returned   leased                             kept        the lease was voided
requeued   generating, grading, kept, leased  waiting     the attempt is given up; another follows
ended      any but ended                      ended       the prompt has its outcome (`GroupEnding`)
forgotten  waiting, leased                    ended       the row will be issued again, under
                                                          another number

Failure rules: only the ledger may refuse an event (a used id, a value without an encoding); then
the group does not change and no observer is notified. An event that the table does not allow is a
defect and raises `IllegalTransitionError` before anything changes. Observers are called in the
event loop, in the order of registration; they must be quick, change no group and not fail. An
observer's error is a defect: it fails the call or task that caused the event, and later observers
miss the event. A task that fails ends the service.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.reward.generation.request import GroupProgress
from services.reward.ledger.ledger import PromptLedger
from sluice.algorithm.groups.staleness import GroupAges
from sluice.algorithm.sampling.attempt import Attempt
from sluice.errors import DataError
from sluice.types import Failed, GradedGroup, Outcome, Prompt, PromptEnd, Rollout, Scored

SCORED = "scored"
NOT_ADMITTED = Attempt("", -1, None, 0)


class GroupState(StrEnum):
    """Where a group is."""

    WAITING = "waiting"
    GENERATING = "generating"
    GRADING = "grading"
    KEPT = "kept"
    LEASED = "leased"
    ENDED = "ended"


IN_FLIGHT = frozenset({GroupState.GENERATING, GroupState.GRADING})


class EventKind(StrEnum):
    """What happened to a group."""

    ACCEPTED = "accepted"
    ADMITTED = "admitted"
    GENERATED = "generated"
    GRADED = "graded"
    CONTINUED = "continued"
    KEPT = "kept"
    LEASED = "leased"
    RETURNED = "returned"
    REQUEUED = "requeued"
    ENDED = "ended"
    FORGOTTEN = "forgotten"


PENDING_STATES = tuple(state for state in GroupState if state is not GroupState.ENDED)
_HOLDS_SAMPLES = IN_FLIGHT | {GroupState.KEPT, GroupState.LEASED}

TRANSITIONS: Mapping[EventKind, tuple[frozenset[GroupState], frozenset[GroupState]]] = {
    EventKind.ADMITTED: (frozenset({GroupState.WAITING}), frozenset({GroupState.GENERATING})),
    EventKind.GENERATED: (frozenset({GroupState.GENERATING}), IN_FLIGHT),
    EventKind.GRADED: (IN_FLIGHT, IN_FLIGHT),
    EventKind.CONTINUED: (IN_FLIGHT, frozenset({GroupState.GENERATING})),
    EventKind.KEPT: (frozenset({GroupState.GRADING}), frozenset({GroupState.KEPT})),
    EventKind.LEASED: (frozenset({GroupState.KEPT}), frozenset({GroupState.LEASED})),
    EventKind.RETURNED: (frozenset({GroupState.LEASED}), frozenset({GroupState.KEPT})),
    EventKind.REQUEUED: (_HOLDS_SAMPLES, frozenset({GroupState.WAITING})),
    EventKind.ENDED: (frozenset(PENDING_STATES), frozenset({GroupState.ENDED})),
    EventKind.FORGOTTEN: (
        frozenset({GroupState.WAITING, GroupState.LEASED}),
        frozenset({GroupState.ENDED}),
    ),
}
"""For each event: the states it may start from, and those it may lead to. See the table above."""


class IllegalTransitionError(AssertionError):
    """An event that the table does not allow."""


class CancelReason(StrEnum):
    """Why an attempt is given up, although nothing of it failed. The prompt starts again, unless
    the group is too old.

    A group that failed is not given up: its prompt ends (`GroupRun`). A running group is given up
    by cancelling its task (`GroupLoop._give_up`); a kept or leased one has none and is requeued at
    once. `records.statistics` has the use of the tokens for each reason.
    """

    TAKEN_OVER = "taken_over"  # another trainer takes over
    ROLLED_BACK = "rolled_back"  # the policy that sampled it was rolled back
    PREEMPTED = "preempted"  # its batch is full
    NO_SLOT = "no_slot"  # it will be too old before a batch has a slot
    TOO_OLD = "too_old"  # the prompt ends as stale


class EndCause(StrEnum):
    """Why a prompt ends: because of its group's result or a property of the prompt."""

    RESULT = "result"
    OVERLONG = "overlong"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class GroupEnding:
    """How a prompt ended, and why.

    Args:
        end: the outcome.
        detail: describes a failure; begins with its `FailureKind` if one sample's was decisive.
        step: the train step that used the group.
        failed: the failure of all samples, if nothing could be generated.
        cause: the cause, if not the group's result.
    """

    end: PromptEnd
    detail: str = ""
    step: int | None = None
    failed: Failed | None = None
    cause: EndCause = EndCause.RESULT


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """How a prompt ended, for the client that submitted it.

    `samples` counts the samples by how they ended, if known.
    """

    prompt_id: str
    end: PromptEnd
    step: int | None
    rewards: tuple[float, ...]
    detail: str
    samples: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Group:
    """A prompt and its current attempt.

    Only `GroupTable` changes `state`. `GroupRun` counts the requests and samples, the stream counts
    the tokens, and the loop sets the task and the reason of its cancellation.

    Attributes:
        prompt: the prompt that the samples answer.
        state: see the table above.
        num_preemptions: attempts in a row that were preempted.
        ending: how the prompt ended.

    Attributes of the current attempt, which `requeued` resets:
        admitted_as: what the sampling strategy decided when the attempt started.
        attempt: the strategy's decision, updated after the probes.
        version: policy version announced when it started; ``None`` before that.
        started_s, generated_s: when it started and when its last samples arrived, `time.monotonic`.
        oldest_version: version of its oldest token; ``None`` without tokens.
        has_reservation: a batch slot is reserved for it.
        is_sure: it counts as kept, because its samples differ already or it has a reservation.
        num_unrequested: sequences that it has not yet requested from the fleet.
        num_requests: requests in progress.
        num_ungraded: requested samples whose outcomes are not counted yet.
        progress: the time and tokens that its requests share, and what replicas sent for it.
        graded: the result: the group as kept, filtered or failed.
        task: the task that runs it, if any.
        is_running: the task has begun, so its code sees a cancellation.
        cancel_reason: why the task was cancelled; ``None`` if it was not.
    """

    prompt: Prompt
    state: GroupState = GroupState.WAITING
    num_preemptions: int = 0
    ending: GroupEnding | None = None
    admitted_as: Attempt = NOT_ADMITTED
    attempt: Attempt = NOT_ADMITTED
    version: int | None = None
    started_s: float = 0.0
    generated_s: float | None = None
    oldest_version: int | None = None
    has_reservation: bool = False
    is_sure: bool = False
    num_unrequested: int = 0
    num_requests: int = 0
    num_ungraded: int = 0
    progress: GroupProgress = field(default_factory=GroupProgress)
    graded: GradedGroup | None = None
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    cancel_reason: CancelReason | None = None

    @property
    def prompt_id(self) -> str:
        """The id of its prompt."""
        return self.prompt.prompt_id

    @property
    def outcome(self) -> PromptOutcome:
        """How the prompt ended, for a client."""
        ending, graded = self.ending, self.graded
        assert ending is not None, f"prompt {self.prompt_id} has not ended"
        rewards = tuple(scored.reward for scored in graded.scored) if graded else ()
        samples = outcome_counts(graded.outcomes) if graded else {}
        return PromptOutcome(
            self.prompt_id, ending.end, ending.step, rewards, ending.detail, samples
        )

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the task, once. A task that has not begun checks the reason when it begins,
        because asyncio would end it without running any of its code."""
        if self.cancel_reason is None and self.task is not None:
            self.cancel_reason = reason
            if self.is_running:
                self.task.cancel()

    def check_cancelled(self) -> None:
        """Raise if the task was cancelled, before its group is filtered or kept.

        A task sees its cancellation only at its next await, and may have none left. Without this
        check the group would be kept or filtered while its prompt also starts again.

        Raises:
            CancelledError: the task was cancelled.
        """
        if self.cancel_reason is not None:  # `Task.cancelling` counts inner groups' cancels, too
            raise asyncio.CancelledError

    def reset(self) -> None:
        """Reset the attributes of the attempt."""
        # In place: the loop and the observers hold this object.
        new_group = Group(self.prompt, self.state, self.num_preemptions)
        for name in self.__slots__:
            setattr(self, name, getattr(new_group, name))


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """An event in the life of a group, published after the group has changed.

    Attributes:
        kind: the kind of event.
        group: the group; for ``REQUEUED`` and ``ENDED`` it still has the attempt that is over.
        before: the previous state.
        graded: for ``GRADED``: the samples and their outcomes.
        num_greedy_tokens: for ``GENERATED``: the length of the greedy response.
        num_replaced: for ``CONTINUED``: samples without a grade that are generated again.
        why: for ``REQUEUED``: the reason.
    """

    kind: EventKind
    group: Group
    before: GroupState
    graded: GradedGroup | None = None
    num_greedy_tokens: int = 0
    num_replaced: int = 0
    why: CancelReason | None = None


Observer = Callable[[GroupEvent], None]


class GroupCounts:
    """The number of groups in each state. Only `GroupTable` changes it."""

    def __init__(self) -> None:
        self.counts = Counter[GroupState]()

    @property
    def num_in_flight(self) -> int:
        """Groups that are generated or graded now."""
        return self.counts[GroupState.GENERATING] + self.counts[GroupState.GRADING]

    @property
    def num_kept(self) -> int:
        """Groups that wait for a train batch."""
        return self.counts[GroupState.KEPT]


class SourceGroups(GroupCounts):
    """The groups of one source.

    Attributes:
        ages: the groups by version, for the staleness rules.
        num_sure: groups in flight that count as kept.
        num_reserved: groups in flight with a reserved slot.
    """

    def __init__(self, ages: GroupAges) -> None:
        super().__init__()
        self.ages = ages
        self.num_sure = self.num_reserved = 0


class GroupTable(GroupCounts):
    """All groups whose prompts are pending, by prompt id.

    Only this class writes the counts and the ages of groups (`GroupAges`), which follow from the
    groups.

    Args:
        ledger: the durable record; its pending prompts wait or are leased.
        ages: for the staleness rules, by source.

    Attributes, which only this class writes, except `policy_version`:
        ledger: see above.
        counts: groups of all sources, by state.
        of_source: the groups of each source.
        policy_version: the announced version; ``None`` before the first and during a takeover by a
            trainer.
        num_unrequested: sequences that groups in flight have not requested yet.

    Raises:
        DataError: the ledger holds prompts of a source that the run lacks.
    """

    def __init__(self, ledger: PromptLedger, ages: Mapping[str, GroupAges]) -> None:
        super().__init__()
        self.ledger = ledger
        self._observers: list[Observer] = []
        self.of_source = {name: SourceGroups(group_ages) for name, group_ages in ages.items()}
        self._groups = {prompt.prompt_id: Group(prompt) for prompt in ledger.pending()}
        for prompt_id in ledger.leased_ids():
            self._groups[prompt_id].state = GroupState.LEASED
        for group in self._groups.values():
            self._check_source(group.prompt)
            self.counts[group.state] += 1
            self.of(group).counts[group.state] += 1
        self.policy_version: int | None = None
        self.num_unrequested = 0

    def observe(self, observer: Observer) -> None:
        """Add an observer; notify it of the groups that are pending now, the oldest first."""
        self._observers.append(observer)
        for group in self.in_order():
            observer(GroupEvent(EventKind.ACCEPTED, group, GroupState.WAITING))
            if group.state is GroupState.LEASED:
                observer(GroupEvent(EventKind.LEASED, group, GroupState.KEPT))

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __getitem__(self, prompt_id: str) -> Group:
        return self._groups[prompt_id]

    def of(self, group: Group) -> SourceGroups:
        """Return the counts and ages of a group's source."""
        return self.of_source[group.prompt.source]

    def in_state(self, *states: GroupState) -> list[Group]:
        """Return the groups in these states."""
        return [group for group in self._groups.values() if group.state in states]

    def in_order(self) -> list[Group]:
        """Return all groups in the order of issue."""
        return sorted(self._groups.values(), key=lambda group: group.prompt.sequence)

    # -------------------------------------------------------------------------------- the events

    def accept(self, prompt: Prompt) -> Group:
        """Accept a prompt.

        Raises:
            InvalidRequestError: its id was used before, or it cannot be encoded.
        """
        self.ledger.accept(prompt)
        return self._add(prompt)

    def reissue(self, prompts: Iterable[Prompt]) -> None:
        """Accept again the clients' prompts that were trained into weights that are lost."""
        for prompt in prompts:
            self.ledger.reissue((prompt,))
            self._add(prompt)

    def admit(
        self, group: Group, attempt: Attempt, num_sequences: int, *, reserves_slot: bool = False
    ) -> None:
        """Start an attempt.

        Args:
            group: whose.
            attempt: what the strategy decided.
            num_sequences: sequences in its first request to the fleet.
            reserves_slot: reserve a slot in the next batch for it.
        """
        old_state = self._move(group, EventKind.ADMITTED, GroupState.GENERATING)
        group.admitted_as = group.attempt = attempt
        group.version = self.policy_version or 0
        group.started_s = time.monotonic()
        group.num_requests = 1
        group.num_unrequested = num_sequences
        self.num_unrequested += num_sequences
        if reserves_slot:
            group.has_reservation = group.is_sure = True
            of_source = self.of(group)
            of_source.num_sure += 1
            of_source.num_reserved += 1
            of_source.ages.reserve(group.prompt_id, group.version)
        self._publish(GroupEvent(EventKind.ADMITTED, group, old_state))

    def set_oldest_version(self, group: Group, version: int | None) -> None:
        """Set the version of a group's oldest token; ``None`` if it waits without tokens.

        From now on its sequences run, or wait in the queue, which counts them.
        """
        if group.state not in IN_FLIGHT:
            return
        self.num_unrequested -= group.num_unrequested
        group.num_unrequested = 0
        group.oldest_version = version
        if version is None:
            self.of(group).ages.pauses(group.prompt_id)
        else:
            self.of(group).ages.add_running(group.prompt_id, version)

    def note_generated(self, group: Group, num_greedy_tokens: int = 0) -> None:
        """Note that the samples of a request have arrived, and the greedy response if there is
        one."""
        num_requests = group.num_requests - 1
        new_state = GroupState.GENERATING if num_requests else GroupState.GRADING
        old_state = self._move(group, EventKind.GENERATED, new_state)
        group.num_requests = num_requests
        if not num_requests:
            group.generated_s = time.monotonic()
        event = EventKind.GENERATED
        self._publish(GroupEvent(event, group, old_state, num_greedy_tokens=num_greedy_tokens))

    def note_graded(self, group: Group, graded: GradedGroup) -> None:
        """Note the outcomes of some samples; a greedy response counts as one more sample."""
        old_state = self._move(group, EventKind.GRADED, group.state)
        group.num_ungraded -= len(graded.outcomes)
        group.num_ungraded -= len(graded.greedy.outcomes) if graded.greedy else 0
        self._publish(GroupEvent(EventKind.GRADED, group, old_state, graded))

    def note_more(self, group: Group, *, is_sure: bool, replaced: Sequence[Rollout] = ()) -> None:
        """Note that more samples are requested, or replacements for those in `replaced`.

        Args:
            group: whose.
            is_sure: two of the samples so far differ, so the group will be kept.
            replaced: samples without a grade.
        """
        old_state = self._move(group, EventKind.CONTINUED, GroupState.GENERATING)
        group.num_requests += 1
        is_sure = is_sure or group.has_reservation
        self.of(group).num_sure += is_sure - group.is_sure
        group.is_sure = is_sure
        group.progress.num_replaced += sum(sample.num_tokens for sample in replaced)
        event = EventKind.CONTINUED
        self._publish(GroupEvent(event, group, old_state, num_replaced=len(replaced)))

    def keep(self, group: Group, graded: GradedGroup) -> None:
        """Keep a group for a train batch."""
        old_state = self._move(group, EventKind.KEPT, GroupState.KEPT)
        group.graded = graded
        group.num_preemptions = 0
        self.of(group).ages.keep(group.prompt_id, graded.oldest_version, group.prompt.sequence)
        self._publish(GroupEvent(EventKind.KEPT, group, old_state))

    def lease(self, batch_id: str, version: int, groups: Sequence[Group]) -> None:
        """Give kept groups to the trainer."""
        for group in groups:
            self._check(group, EventKind.LEASED, GroupState.LEASED)
        self.ledger.lease(batch_id, version, [group.prompt_id for group in groups])
        for group in groups:
            old_state = self._move(group, EventKind.LEASED, GroupState.LEASED)
            self._publish(GroupEvent(EventKind.LEASED, group, old_state))

    def leased(self) -> list[Group]:
        """Return the groups of the open lease, in batch order."""
        return [self._groups[prompt_id] for prompt_id in self.ledger.leased_ids()]

    def void_lease(self) -> list[Group]:
        """Void the open lease: its groups wait for another batch.

        Groups leased by an earlier service have lost their samples. They stay leased and are
        returned, for the caller to requeue or end.
        """
        groups = self.leased()
        self.ledger.void_lease()
        for group in groups:
            if group.graded is not None:
                old_state = self._move(group, EventKind.RETURNED, GroupState.KEPT)
                oldest_version, sequence = group.graded.oldest_version, group.prompt.sequence
                self.of(group).ages.keep(group.prompt_id, oldest_version, sequence)
                self._publish(GroupEvent(EventKind.RETURNED, group, old_state))
        return [group for group in groups if group.graded is None]

    def requeue(self, group: Group, why: CancelReason) -> None:
        """Give the current attempt up; the prompt waits for another one."""
        old_state = self._move(group, EventKind.REQUEUED, GroupState.WAITING)
        group.num_preemptions = group.num_preemptions + 1 if why is CancelReason.PREEMPTED else 0
        self._publish(GroupEvent(EventKind.REQUEUED, group, old_state, why=why))
        group.reset()

    def end(self, group: Group, ending: GroupEnding, graded: GradedGroup | None = None) -> None:
        """End a prompt, in the ledger first.

        Args:
            group: its group.
            ending: how.
            graded: the samples of a group that was not kept.
        """
        # Everything else that can fail precedes the ledger, which may refuse.
        self._check(group, EventKind.ENDED, GroupState.ENDED)
        graded = graded or group.graded
        rewards = tuple(scored.reward for scored in graded.scored) if graded else ()
        self.ledger.end(
            group.prompt_id, ending.end, step=ending.step, rewards=rewards, detail=ending.detail
        )
        old_state = self._move(group, EventKind.ENDED, GroupState.ENDED)
        group.graded = graded
        group.ending = ending
        del self._groups[group.prompt_id]
        self._publish(GroupEvent(EventKind.ENDED, group, old_state))

    def forget_data(self) -> None:
        """Forget the pending data-set prompts: their rows are issued again."""
        forgotten = [group for group in self.in_order() if group.prompt.position is not None]
        for group in forgotten:
            self._check(group, EventKind.FORGOTTEN, GroupState.ENDED)
        self.ledger.forget_data()
        for group in forgotten:
            old_state = self._move(group, EventKind.FORGOTTEN, GroupState.ENDED)
            del self._groups[group.prompt_id]
            self._publish(GroupEvent(EventKind.FORGOTTEN, group, old_state))

    def _check_source(self, prompt: Prompt) -> None:
        if prompt.source not in self.of_source:
            known_names = ", ".join(repr(name) for name in self.of_source if name) or "none"
            raise DataError(
                f"the ledger holds prompt '{prompt.prompt_id}' of the source '{prompt.source}', "
                f"and sluice.sources has {known_names}; keep the names of sources within a run, or "
                "choose another sluice.run_dir"
            )

    def _add(self, prompt: Prompt) -> Group:
        group = self._groups[prompt.prompt_id] = Group(prompt)
        self.counts[group.state] += 1
        self.of(group).counts[group.state] += 1
        self._publish(GroupEvent(EventKind.ACCEPTED, group, GroupState.WAITING))
        return group

    def _check(self, group: Group, event: EventKind, new_state: GroupState) -> None:
        sources, targets = TRANSITIONS[event]
        if group.state not in sources or new_state not in targets:
            raise IllegalTransitionError(
                f"prompt {group.prompt_id}: {event} may not lead from {group.state} to {new_state}"
            )

    def _move(self, group: Group, event: EventKind, new_state: GroupState) -> GroupState:
        """Change the state and the values that follow from it; return the old state."""
        self._check(group, event, new_state)
        old_state, group.state = group.state, new_state
        if old_state is new_state:
            return old_state
        of_source = self.of(group)
        for counts in (self.counts, of_source.counts):
            counts[old_state] -= 1
            counts[new_state] += 1
        if old_state in IN_FLIGHT and new_state not in IN_FLIGHT:
            self.num_unrequested -= group.num_unrequested
            of_source.num_sure -= group.is_sure
            of_source.num_reserved -= group.has_reservation
            group.num_unrequested = 0
            group.is_sure = group.has_reservation = False
            of_source.ages.remove_running(group.prompt_id)
        elif old_state is GroupState.KEPT:
            of_source.ages.remove(group.prompt_id)
        return old_state

    def _publish(self, event: GroupEvent) -> None:
        for observer in self._observers:
            observer(event)


def outcome_counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Count samples by how they ended: ``scored`` or a `FailureKind`; without those that are 0."""
    names = (SCORED if isinstance(outcome, Scored) else outcome.kind.value for outcome in outcomes)
    return dict(Counter(names))
