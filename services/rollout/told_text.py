"""What the caller of a streamed response is told of its text, as the tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engines.settled_text import Decode, SettledText
from services.rollout.engines.stop_strings import tellable


class ReportedText:
    """Text that stays, whatever follows: no half of a character, no beginning of a stop string.

    Args:
        stops: strings of which one may end the response.
        decode: of the model's tokenizer.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._settled = stops, SettledText(decode)
        self._held = ""  # settled, but perhaps the beginning of a stop string
        self._num_reported = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes further tokens on; what may be told now."""
        self._held += self._settled.push(token_ids)
        reported = tellable(self._held, self._stops)
        self._held = self._held[len(reported) :]
        self._num_reported += len(reported)
        return reported

    def rest_of(self, text: str) -> str:
        """What was not told yet of the whole text of a response that has ended."""
        return text[self._num_reported :]
