"""A validation set without files."""

from __future__ import annotations

from services.reward.prompts.dataset import IssuedRow
from sluice.data.prompt_rows import PromptRow
from sluice.types import ChatMessage


class Rows:
    """A validation set whose prompts are answered right by the first sample only."""

    def __init__(self, count: int) -> None:
        self.rows_per_epoch = count
        asked = [(ChatMessage("user", f"answer=1 right=1 number={i}"),) for i in range(count)]
        self._draws = [IssuedRow(i, PromptRow(a, "math_dapo", "1")) for i, a in enumerate(asked)]

    def take(self, count: int) -> list[IssuedRow]:
        taken, self._draws = self._draws[:count], self._draws[count:]
        return taken
