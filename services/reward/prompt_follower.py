"""Who follows prompts on their way, told by the ledger of every change as it happens."""

from __future__ import annotations

from services.reward.ledger import PromptState
from sluice.types import Prompt, PromptEnd


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
