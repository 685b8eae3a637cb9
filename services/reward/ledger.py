"""Where every accepted prompt stands.

Invariant 1: an accepted prompt is pending until it ends in exactly one `PromptEnd`; submitted =
ended + pending at every instant. A prompt whose work is lost goes back to ``WAITING``, one whose
first samples were graded and the rest is wanted from ``GRADING`` to ``GENERATING``; nothing else
moves it backwards. A prompt that is passed by ends as ``SKIPPED`` without being generated for. A
client's prompt that was trained into weights which did not survive is accepted anew (`reissue`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.reward.ledger_content import EndedPrompt, OpenLease
from services.reward.received_samples import ReceivedSamples
from services.reward.sample_parts import SampleParts
from sluice.types import DataProgress, Prompt, PromptEnd


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
        """The incarnation that announced itself last."""
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

    def begin_trainer(self, incarnation: str) -> None:
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

    @property
    def saved_bytes(self) -> int | None:
        """Size of all samples that are noted; ``None`` where none outlives the process."""
        ...

    def received(self, prompt_id: str) -> ReceivedSamples | None:
        """What an earlier service received of a prompt's samples; ``None``: nothing."""
        ...

    def save_samples(self, prompt_id: str, parts: SampleParts) -> None:
        """Note what else was received of a prompt's samples, if it is pending."""
        ...

    def forget_samples(self, prompt_id: str) -> None:
        """What was received of a prompt's samples is of no use any more; harmless without any."""
        ...

    def change_trainer(self, version: int | None) -> None:
        """Another trainer begins: forget samples of versions after its own, or all (``None``)."""
        ...

    def noted(self) -> int:
        """A ticket for all that was changed so far."""
        ...

    async def durable(self, change_number: int | None = None) -> None:
        """Wait until what `ticket` stands for (``None``: all) survives the death of the process."""
        ...
