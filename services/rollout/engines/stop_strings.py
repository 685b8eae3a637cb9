"""Strings that end a response: where its tokens end, and how much of its text may be told."""

from __future__ import annotations

from collections.abc import Sequence

from services.rollout.engines.settled_text import Decode, SettledText

__all__ = ["Decode", "StopStringWatch", "before_stop", "tellable"]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that begins first; all of it if it holds none."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def tellable(text: str, stops: Sequence[str]) -> str:
    """What of an unfinished text stays, whatever follows: no stop string, nor the beginning of one.

    It only grows as the text grows, up to the first stop string.
    """
    reported = before_stop(text, stops)
    if len(reported) < len(text):
        return reported
    held = max((_overlap(text, stop) for stop in stops), default=0)
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


class StopStringWatch:
    """Follows one response token by token.

    Args:
        stops: at least one, none of them empty.
        decode: of the model's tokenizer.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._text = tuple(stops), SettledText(decode)
        self._kept = max(map(len, stops)) - 1
        self._tail = ""  # the end of the text, in which a stop string may have begun

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Takes further tokens on.

        Returns:
            How many of them belong to the response, whose last one completes a stop string;
            ``None`` if there is none. Nothing may be pushed after it.
        """
        for place, token in enumerate(token_ids):
            self._tail += self._text.push((token,))
            if any(stop in self._tail for stop in self._stops):
                return place + 1
            self._tail = self._tail[-self._kept :] if self._kept else ""
        return None
