"""Strings that end a response: where its tokens end, and how much of its text may be told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sluice.types import TokenIds

__all__ = ["Decode", "StopStringWatch", "before_stop", "tellable"]

Decode = Callable[[TokenIds], str]
"""The text of response tokens; called in the thread that draws them."""

# A character of UTF-8 has four bytes at most, and a token one at least; an unfinished one lacks one
# byte or more, for each of which a tokenizer may write one sign.
_MOST_CHARACTER_TOKENS = 4
_MOST_UNFINISHED_SIGNS = 3
_UNFINISHED = "\ufffd"


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that begins first; all of it if it holds none."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def tellable(text: str, stops: Sequence[str]) -> str:
    """What of an unfinished text stays, whatever follows: no stop string, nor the beginning of one.

    It only grows as the text grows, up to the first stop string.
    """
    told = before_stop(text, stops)
    if len(told) < len(text):
        return told
    held = max((_overlap(text, stop) for stop in stops), default=0)
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


class StopStringWatch:
    """Follows one response token by token.

    Each token is decoded together with the one or few before it, not with the whole response: how
    a token reads depends on its neighbours alone.

    Args:
        stops: at least one, none of them empty.
        decode: of the model's tokenizer.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = tuple(stops), decode
        self._kept = max(map(len, stops)) - 1
        self._window: list[int] = []  # tokens whose text is known, then tokens whose is not yet
        self._known_tokens, self._known_text = 0, ""
        self._tail = ""  # the end of the text, in which a stop string may have begun

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Takes further tokens on.

        Returns:
            How many of them belong to the response, whose last one completes a stop string;
            ``None`` if there is none. Nothing may be pushed after it.
        """
        for place, token in enumerate(token_ids):
            if self._completes(token):
                return place + 1
        return None

    def _completes(self, token: int) -> bool:
        self._window.append(token)
        text = self._text(self._window)
        unknown = self._window[self._known_tokens :]
        if text.endswith(_UNFINISHED) and len(unknown) < _MOST_CHARACTER_TOKENS:
            # A token may end one character and begin the next one.
            return self._ends(self._tail + text[len(self._known_text) :].rstrip(_UNFINISHED))
        # The last of many tokens may still begin a character, whose text is then not settled.
        unsettled = _unsettled(text)
        self._tail += text[len(self._known_text) : len(text) - unsettled]
        found = self._ends(self._tail)
        self._tail = self._tail[-self._kept :] if self._kept else ""
        self._window, self._known_tokens = unknown, len(unknown)
        known = self._text(unknown)
        self._known_text = known[: len(known) - unsettled]
        return found

    def _ends(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._decode(np.array(token_ids, np.uint32))


def _unsettled(text: str) -> int:
    """Signs at the end of a text that further tokens may turn into a character."""
    return min(len(text) - len(text.rstrip(_UNFINISHED)), _MOST_UNFINISHED_SIGNS)
