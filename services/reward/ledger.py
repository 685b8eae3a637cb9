"""Where every accepted prompt stands.

Invariant 1: an accepted prompt is pending until it ends in exactly one `PromptEnd`; submitted =
ended + pending at every instant. A prompt whose work is lost goes back to ``WAITING``, one whose
first samples were graded and the rest is wanted from ``GRADING`` to ``GENERATING``; nothing else
moves it backwards. A prompt that is passed by ends as ``SKIPPED`` without being generated for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import DataProgress, Prompt, PromptEnd

ENDED_IDS_REMEMBERED = 65_536
"""Ids of clients' prompts that ended last and cannot be used again; with 128 bytes each 8 MiB."""


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
    """What the pipeline needs of a ledger."""

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

    def end(self, prompt_id: str, end: PromptEnd) -> Prompt:
        """End a pending prompt; `NotFoundError` if it is not pending."""
        ...

    def state(self, prompt_id: str) -> PromptState:
        """Where a pending prompt stands; `NotFoundError` if it is not pending."""
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


class MemoryLedger:
    """A ledger that lives as long as the process.

    Args:
        ended_ids: how many ids of ended clients' prompts are remembered.
    """

    def __init__(self, ended_ids: int = ENDED_IDS_REMEMBERED) -> None:
        self._sequence = 0
        self._prompts: dict[str, Prompt] = {}
        self._states: dict[str, PromptState] = {}
        self._max_ended_ids = ended_ids
        self._ended_ids: OrderedDict[str, None] = OrderedDict()
        self._by_end: Counter[PromptEnd] = Counter()
        self._num_submitted = 0
        self._low_water = 0
        self._ended_above: set[int] = set()

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
        if prompt.prompt_id in self._prompts or prompt.prompt_id in self._ended_ids:
            raise InvalidRequestError(
                f"prompt_id '{prompt.prompt_id}' was used before; choose a new one for each prompt"
            )
        self._prompts[prompt.prompt_id] = prompt
        self._states[prompt.prompt_id] = PromptState.WAITING
        self._num_submitted += 1

    def move(self, prompt_id: str, state: PromptState) -> None:
        """Note where a pending prompt stands now.

        Raises:
            NotFoundError: the prompt is not pending.
        """
        self.state(prompt_id)
        self._states[prompt_id] = state

    def end(self, prompt_id: str, end: PromptEnd) -> Prompt:
        """End a pending prompt.

        Raises:
            NotFoundError: the prompt is not pending.
        """
        self.state(prompt_id)
        del self._states[prompt_id]
        prompt = self._prompts.pop(prompt_id)
        self._by_end[end] += 1
        if prompt.position is None:
            self._remember(prompt_id)
        else:
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

    def _remember(self, prompt_id: str) -> None:
        self._ended_ids[prompt_id] = None
        if len(self._ended_ids) > self._max_ended_ids:
            self._ended_ids.popitem(last=False)

    def _end_position(self, position: int) -> None:
        if position >= self._low_water:
            self._ended_above.add(position)
        while self._low_water in self._ended_above:
            self._ended_above.discard(self._low_water)
            self._low_water += 1
