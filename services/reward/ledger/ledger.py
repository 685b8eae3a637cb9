"""Where every accepted prompt stands.

Invariant 1: an accepted prompt is pending until it ends in exactly one `PromptEnd`; submitted =
ended + pending at every instant. A prompt whose work is lost goes back to ``WAITING``, one whose
first samples were graded and the rest is wanted from ``GRADING`` to ``GENERATING``; nothing else
moves it backwards. A prompt that is passed by ends as ``SKIPPED`` without being generated for. A
client's prompt that was trained into weights which did not survive is accepted anew (`reissue`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.reward.ledger.content import (
    EndedPrompt,
    LedgerContent,
    OpenLease,
    body_digest,
    encode_body,
)
from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import DataProgress, Prompt, PromptEnd, PromptOrigin


class PromptState(StrEnum):
    """Where a pending prompt stands."""

    WAITING = "waiting"
    GENERATING = "generating"
    GRADING = "grading"
    KEPT = "kept"
    LEASED = "leased"


@dataclass(frozen=True, slots=True)
class Accounts:
    """Prompts accepted and ended since the start, as events, and those pending, by their states.

    ``num_submitted == sum(by_end) + sum(by_state)``, unless prompts got lost (`prompt_audit`).
    """

    num_submitted: int
    by_end: Mapping[PromptEnd, int]
    by_state: Mapping[PromptState, int]

    @property
    def num_pending(self) -> int:
        """Accepted and not ended."""
        return sum(self.by_state.values())


class PromptLedger(Protocol):
    """What the reward service needs of a ledger. Reads are answered from memory."""

    @property
    def num_clients_pending(self) -> int:
        """Clients' prompts that are pending."""
        ...

    @property
    def client_image_bytes(self) -> int:
        """Images of clients' prompts that are pending, bytes."""
        ...

    @property
    def open_lease(self) -> OpenLease | None:
        """The batch at the trainer, also when it was leased before a restart."""
        ...

    @property
    def num_acknowledged(self) -> int:
        """Groups of all acknowledged batches."""
        ...

    @property
    def trainer(self) -> str | None:
        """The instance that announced itself last."""
        ...

    def next_sequence(self) -> int:
        """The number of the next prompt in the order of issue."""
        ...

    def accept(self, prompt: Prompt) -> None:
        """Take a prompt on as ``WAITING``; `InvalidRequestError` if its id was used before.

        Remembered are the ids of all pending prompts and of the clients' that ended last.
        """
        ...

    def move(self, prompt_id: str, state: PromptState) -> None:
        """Note where a pending prompt stands now."""
        ...

    def end(
        self,
        prompt_id: str,
        end: PromptEnd,
        *,
        step: int | None = None,
        rewards: Sequence[float] = (),
        detail: str = "",
    ) -> Prompt:
        """End a pending prompt; `NotFoundError` if it is not pending."""
        ...

    def state(self, prompt_id: str) -> PromptState:
        """Where a pending prompt stands; `NotFoundError` if it is not pending."""
        ...

    def prompt(self, prompt_id: str) -> Prompt | None:
        """A pending prompt; ``None`` if it is not."""
        ...

    def ended(self, prompt_id: str) -> EndedPrompt | None:
        """A client's prompt among those that ended last."""
        ...

    def pending(self) -> tuple[Prompt, ...]:
        """Pending prompts in the order of issue."""
        ...

    def pending_ids(self) -> Collection[str]:
        """Ids of the pending prompts, in no order."""
        ...

    def accounts(self) -> Accounts:
        """The counts now."""
        ...

    def progress(self, also_ended: Iterable[int] = ()) -> DataProgress:
        """Which data-set positions ended, and those of `also_ended`."""
        ...

    def restart_data(self, progress: DataProgress) -> DataProgress:
        """Go back to `progress`; returns where drawing resumes (pending positions left out)."""
        ...

    def forget_data(self) -> None:
        """Take back that data-set prompts were drawn which are pending: they are drawn again."""
        ...

    def lease(self, batch_id: str, version: int, prompt_ids: Sequence[str]) -> None:
        """Pending prompts are given to the trainer, in the one lease that is open."""
        ...

    def release_lease(self) -> tuple[Prompt, ...]:
        """The open lease is taken back: its prompts, ``WAITING`` from now on."""
        ...

    def leased(self, batch_id: str) -> tuple[Prompt, ...] | None:
        """The pending prompts of the open lease; ``None`` if it was acknowledged before.

        `NotFoundError` if no such batch is open or among the last that were acknowledged.
        """
        ...

    def acknowledge(self) -> None:
        """Close the open lease, all of whose prompts have ended as trained."""
        ...

    def begin_trainer(self, instance_id: str) -> None:
        """Note who trains."""
        ...

    async def trained_after(self, step: int) -> tuple[Prompt, ...]:
        """Clients' prompts that later steps trained, as far as they are remembered whole."""
        ...

    def reissue(self, prompts: Iterable[Prompt]) -> None:
        """Accept ended clients' prompts once more, under their numbers."""
        ...

    @property
    def has_strikes(self) -> bool:
        """Whether any prompt has strikes."""
        ...

    def strikes(self, key: str) -> int:
        """Strikes in a row of the prompt with this key (`prompt_key`); 0 if it has none."""
        ...

    def all_strikes(self) -> Mapping[str, int]:
        """The strikes of all prompts that have any, by key."""
        ...

    def note_strikes(self, key: str, strikes: int) -> None:
        """A prompt has so many strikes now; of those with some the last are remembered."""
        ...

    def noted(self) -> int:
        """A ticket for all that was changed so far."""
        ...

    async def durable(self, change_number: int | None = None) -> None:
        """Wait until what `ticket` stands for (``None``: all) survives the death of the process."""
        ...


class PromptObserver:
    """Follows none; what extends it is told at once, and must be quick and never fail."""

    def accepted(self, prompt: Prompt) -> None:
        """A prompt is pending from here on, and waits."""

    def moved(self, prompt_id: str, state: PromptState) -> None:
        """A pending prompt stands there now."""

    def ended(self, prompt_id: str, end: PromptEnd, step: int | None, detail: str) -> None:
        """A prompt has ended."""

    def forgotten(self, prompt_id: str) -> None:
        """A prompt is pending no more, as if it had never been accepted."""


NOBODY = PromptObserver()


ENDED_IDS_REMEMBERED = 65_536
"""Clients' prompts that ended last, whose ids cannot be used again; with 500 bytes each 32 MiB."""
ACKNOWLEDGED_REMEMBERED = 64
"""Batches acknowledged last, whose acknowledgement may be repeated after a restart."""
STRIKES_REMEMBERED = 65_536
"""Prompts with strikes, those struck last."""
MAX_DETAIL_CHARS = 1000


class MemoryLedger:
    """A ledger that lives as long as the process. It keeps no ended prompts to issue again.

    Args:
        ended_ids: how many ended clients' prompts are remembered.
        content: what it begins with.
    """

    def __init__(
        self, ended_ids: int = ENDED_IDS_REMEMBERED, content: LedgerContent | None = None
    ) -> None:
        content = content or LedgerContent()
        self._sequence = content.next_sequence
        self._prompts = {prompt.prompt_id: prompt for prompt in content.pending}
        self._states = dict.fromkeys(self._prompts, PromptState.WAITING)
        self._num_clients = sum(p.origin is PromptOrigin.CLIENT for p in content.pending)
        self._image_bytes = sum(map(_client_image_bytes, content.pending))
        self._max_ended_ids = ended_ids
        self._ended: OrderedDict[str, EndedPrompt] = OrderedDict(content.ended)
        self._by_end: Counter[PromptEnd] = Counter(content.by_end)
        self._num_submitted = sum(self._by_end.values()) + len(self._prompts)
        self._low_water = content.progress.low_water
        self._ended_above: set[int] = set(content.progress.ended_above)
        self._acknowledged: OrderedDict[str, None] = OrderedDict.fromkeys(content.acknowledged)
        self._num_acknowledged, self._trainer = content.num_acknowledged, content.trainer
        self._lease = content.lease
        self._strikes: OrderedDict[str, int] = OrderedDict(content.strikes)
        self._observer = NOBODY
        for prompt in self._leased_prompts():
            self._states[prompt.prompt_id] = PromptState.LEASED

    def observe(self, observer: PromptObserver) -> None:
        """Tell somebody where every prompt stands, the pending ones first."""
        self._observer = observer
        for prompt in self.pending():
            observer.accepted(prompt)
            if (state := self._states[prompt.prompt_id]) is not PromptState.WAITING:
                observer.moved(prompt.prompt_id, state)

    @property
    def num_clients_pending(self) -> int:
        """Clients' prompts that are pending."""
        return self._num_clients

    @property
    def client_image_bytes(self) -> int:
        """Images of clients' prompts that are pending, bytes."""
        return self._image_bytes

    @property
    def open_lease(self) -> OpenLease | None:
        """The batch at the trainer."""
        return self._lease

    @property
    def num_acknowledged(self) -> int:
        """Groups of all acknowledged batches."""
        return self._num_acknowledged

    @property
    def trainer(self) -> str | None:
        """The instance that announced itself last."""
        return self._trainer

    @property
    def content(self) -> LedgerContent:
        """All that it knows now, but for the stages of its pending prompts."""
        return LedgerContent(
            self._sequence,
            self.pending(),
            dict(self._ended),
            {end: count for end, count in self._by_end.items() if count},
            self.progress(),
            self._lease,
            tuple(self._acknowledged),
            self._num_acknowledged,
            self._trainer,
            dict(self._strikes),
        )

    def next_sequence(self) -> int:
        """The number of the next prompt in the order of issue."""
        self._sequence += 1
        return self._sequence - 1

    def accept(self, prompt: Prompt) -> None:
        """Take a prompt on as ``WAITING``.

        Raises:
            InvalidRequestError: the id is that of a pending prompt, or of one of the clients' that
                ended last.
        """
        if prompt.prompt_id in self._prompts or prompt.prompt_id in self._ended:
            raise InvalidRequestError(
                f"prompt_id '{prompt.prompt_id}' was used before; choose a new one for each prompt"
            )
        self._take_on(prompt)

    def move(self, prompt_id: str, state: PromptState) -> None:
        """Note where a pending prompt stands now.

        Raises:
            NotFoundError: the prompt is not pending.
        """
        self.state(prompt_id)
        self._states[prompt_id] = state
        self._observer.moved(prompt_id, state)

    def end(
        self,
        prompt_id: str,
        end: PromptEnd,
        *,
        step: int | None = None,
        rewards: Sequence[float] = (),
        detail: str = "",
    ) -> Prompt:
        """End a pending prompt.

        Args:
            prompt_id: whose.
            end: how.
            step: the train step that used it.
            rewards: of its samples.
            detail: further words, of which the first `MAX_DETAIL_CHARS` are kept.

        Raises:
            NotFoundError: the prompt is not pending.
        """
        self.state(prompt_id)
        prompt = self._leave(prompt_id)
        self._observer.ended(prompt_id, end, step, detail)
        self._by_end[end] += 1
        if prompt.origin is PromptOrigin.CLIENT:
            digest, kept = body_digest(encode_body(prompt)), detail[:MAX_DETAIL_CHARS]
            self._remember(
                prompt_id, EndedPrompt(prompt.sequence, digest, end, step, tuple(rewards), kept)
            )
        elif prompt.position is not None:
            self._end_position(prompt.position)
        return prompt

    def state(self, prompt_id: str) -> PromptState:
        """Where a pending prompt stands.

        Raises:
            NotFoundError: the prompt is not pending.
        """
        state = self._states.get(prompt_id)
        if state is None:
            raise NotFoundError(f"prompt '{prompt_id}' is not pending")
        return state

    def prompt(self, prompt_id: str) -> Prompt | None:
        """A pending prompt; ``None`` if it is not."""
        return self._prompts.get(prompt_id)

    def ended(self, prompt_id: str) -> EndedPrompt | None:
        """A client's prompt among those that ended last."""
        return self._ended.get(prompt_id)

    def pending(self) -> tuple[Prompt, ...]:
        """Pending prompts in the order of issue."""
        return tuple(sorted(self._prompts.values(), key=lambda prompt: prompt.sequence))

    def pending_ids(self) -> Collection[str]:
        """Ids of the pending prompts, in no order."""
        return self._prompts.keys()

    def accounts(self) -> Accounts:
        """The counts now."""
        states = Counter(self._states.values())
        by_state = {state: states[state] for state in PromptState}
        by_end = {end: self._by_end[end] for end in PromptEnd}
        return Accounts(self._num_submitted, by_end, by_state)

    def progress(self, also_ended: Iterable[int] = ()) -> DataProgress:
        """Which data-set positions ended, and those of `also_ended`."""
        ended = self._ended_above | set(also_ended)
        low_water = self._low_water
        while low_water in ended:
            ended.discard(low_water)
            low_water += 1
        return DataProgress(low_water, tuple(sorted(ended)))

    def restart_data(self, progress: DataProgress) -> DataProgress:
        """Take `progress` for what ended so far, as after a trainer's resume.

        Returns:
            where drawing resumes: what ended, and what is pending here and need not be drawn anew.
        """
        self._low_water, self._ended_above = progress.low_water, set(progress.ended_above)
        pending = {p.position for p in self._prompts.values() if p.position is not None}
        return self.progress(also_ended=pending)

    def forget_data(self) -> None:
        """Take back that data-set prompts were drawn which are pending: they are drawn again."""
        for prompt in self.pending():
            if prompt.position is not None:
                self._leave(prompt.prompt_id)
                self._observer.forgotten(prompt.prompt_id)
                self._num_submitted -= 1

    def lease(self, batch_id: str, version: int, prompt_ids: Sequence[str]) -> None:
        """Pending prompts are given to the trainer, in the one lease that is open.

        Raises:
            NotFoundError: one of them is not pending.
        """
        for prompt_id in prompt_ids:
            self.move(prompt_id, PromptState.LEASED)
        self._lease = OpenLease(batch_id, version, tuple(prompt_ids))

    def release_lease(self) -> tuple[Prompt, ...]:
        """The open lease is taken back: its prompts, ``WAITING`` from now on."""
        prompts, self._lease = self._leased_prompts(), None
        for prompt in prompts:
            self.move(prompt.prompt_id, PromptState.WAITING)
        return prompts

    def leased(self, batch_id: str) -> tuple[Prompt, ...] | None:
        """The pending prompts of the open lease; ``None`` if it was acknowledged before.

        Raises:
            NotFoundError: no such batch is open or among the last that were acknowledged.
        """
        if batch_id in self._acknowledged:
            return None
        if self._lease is None or self._lease.batch_id != batch_id:
            raise NotFoundError(
                f"batch '{batch_id}' is not leased (it was taken back, or never existed); "
                "take the next batch"
            )
        return self._leased_prompts()

    def acknowledge(self) -> None:
        """Close the open lease, all of whose prompts have ended as trained."""
        if self._lease is None:
            return
        self._num_acknowledged += len(self._lease.prompt_ids)
        self._acknowledged[self._lease.batch_id] = None
        if len(self._acknowledged) > ACKNOWLEDGED_REMEMBERED:
            self._acknowledged.popitem(last=False)
        self._lease = None

    def begin_trainer(self, instance_id: str) -> None:
        """Note who trains."""
        self._trainer = instance_id

    async def trained_after(self, step: int) -> tuple[Prompt, ...]:
        """None: what ended prompts said is not kept."""
        return ()

    def reissue(self, prompts: Iterable[Prompt]) -> None:
        """Accept ended clients' prompts once more, under their numbers."""
        for prompt in prompts:
            del self._ended[prompt.prompt_id]
            self._take_on(prompt)

    @property
    def has_strikes(self) -> bool:
        """Whether any prompt has strikes."""
        return bool(self._strikes)

    def strikes(self, key: str) -> int:
        """Strikes in a row of the prompt with this key; 0 if it has none."""
        return self._strikes.get(key, 0)

    def all_strikes(self) -> Mapping[str, int]:
        """The strikes of all prompts that have any, by key."""
        return dict(self._strikes)

    def note_strikes(self, key: str, strikes: int) -> None:
        """A prompt has so many strikes now; of those with some the last are remembered."""
        self._strikes.pop(key, None)
        if strikes:
            self._strikes[key] = strikes
        if len(self._strikes) > STRIKES_REMEMBERED:
            self.note_strikes(next(iter(self._strikes)), 0)

    def noted(self) -> int:
        """A ticket for all that was changed so far."""
        return 0

    async def durable(self, change_number: int | None = None) -> None:
        """Nothing outlives the process."""

    def _take_on(self, prompt: Prompt) -> None:
        self._prompts[prompt.prompt_id] = prompt
        self._states[prompt.prompt_id] = PromptState.WAITING
        self._num_clients += prompt.origin is PromptOrigin.CLIENT
        self._image_bytes += _client_image_bytes(prompt)
        self._num_submitted += 1
        self._observer.accepted(prompt)

    def _leave(self, prompt_id: str) -> Prompt:
        del self._states[prompt_id]
        prompt = self._prompts.pop(prompt_id)
        self._num_clients -= prompt.origin is PromptOrigin.CLIENT
        self._image_bytes -= _client_image_bytes(prompt)
        return prompt

    def _leased_prompts(self) -> tuple[Prompt, ...]:
        prompt_ids = self._lease.prompt_ids if self._lease else ()
        found = [self._prompts.get(prompt_id) for prompt_id in prompt_ids]
        return tuple(prompt for prompt in found if prompt is not None)

    def _remember(self, prompt_id: str, ended: EndedPrompt) -> None:
        self._ended[prompt_id] = ended
        if len(self._ended) > self._max_ended_ids:
            self._ended.popitem(last=False)

    def _end_position(self, position: int) -> None:
        if position >= self._low_water:
            self._ended_above.add(position)
        while self._low_water in self._ended_above:
            self._ended_above.discard(self._low_water)
            self._low_water += 1


def _client_image_bytes(prompt: Prompt) -> int:
    """Of a client's prompt; the data set's are bounded by what is under way."""
    if prompt.origin is not PromptOrigin.CLIENT:
        return 0
    return sum(map(len, prompt.images))
