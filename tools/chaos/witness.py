"""A client that submits prompts all the time and remembers their outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from sluice.client import AsyncClient, NewPrompt, RetryPolicy, RunAddress
from sluice.errors import SluiceError
from sluice.types import ChatMessage

_SESSION_S, _PAUSE_S, _MOST_OPEN = 3.0, 0.5, 8
_NO_RETRIES = RetryPolicy(patience_s=0.0)  # each session is one call


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its scorer, and the right answer."""

    text: str
    data_source: str
    answer: str


class Witness:
    """Submits prompts, and those again whose outcome it does not know.

    Attributes:
        accepted: ids with a receipt.
        outcomes: how they ended, as last reported.
        refused: ids with the reason.
    """

    def __init__(self, address: str, questions: Sequence[Question]) -> None:
        self._address, self._questions = address, questions
        self.accepted: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._open: list[NewPrompt] = []
        self._count = 0

    async def run(self) -> None:
        """Submit until cancelled; ask a service that is away again."""
        while True:
            if len(self._open) < _MOST_OPEN:
                self._open.append(self._next())
            with suppress(SluiceError, TimeoutError):
                async with asyncio.timeout(_SESSION_S):
                    await self._submit()
            self._open = [p for p in self._open if p.prompt_id not in self._settled()]
            await asyncio.sleep(_PAUSE_S)

    def _settled(self) -> set[str]:
        return {*self.outcomes, *self.refused}

    def _next(self) -> NewPrompt:
        self._count += 1
        asked = self._questions[self._count % len(self._questions)]
        turn = ChatMessage("user", asked.text)
        return NewPrompt(f"witness-{self._count}", (turn,), asked.data_source, asked.answer)

    async def _submit(self) -> None:
        async with (
            AsyncClient(RunAddress(reward=self._address), policy=_NO_RETRIES) as client,
            aclosing(client.submit(self._open)) as events,
        ):
            async for event in events:
                if event.event == "accepted":
                    self.accepted.add(event.prompt_id)
                elif event.event == "refused":
                    self.refused[event.prompt_id] = event.detail
                else:
                    self.outcomes[event.prompt_id] = event.event
