"""Decode a growing response token by token, and find the stop string that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sluice.types import TokenIds

Decode = Callable[[TokenIds], str]
"""Return the text of response tokens; called in the thread that follows them."""

# A character of UTF-8 has at most four bytes, and a token at least one. An unfinished one lacks at
# least one byte. A tokenizer may write one sign for each missing byte, or one for all.
_MAX_CHARACTER_TOKENS = 4
_MAX_UNFINISHED_SIGNS = 3
_UNFINISHED = "\ufffd"
# So many tokens of bytes that are no text hold the last three signs and something before them.
_MAX_UNSETTLED_TOKENS = 12
_TOKENS_AT_ONCE = 256


class IncrementalDetokenizer:
    """Decodes the part of a growing response that no further token changes.

    Each token is decoded together with the few since the last whole character, not with the whole
    response: how a token reads depends on its neighbours only. The settled text depends on the
    response's tokens, not on how they were split into pieces.

    Args:
        decode: the tokenizer's `decode`.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens with settled text, then tokens without
        self._known_tokens = 0
        self._known_characters = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that they settle."""
        return "".join(
            self._piece(token_ids[start : start + _TOKENS_AT_ONCE])
            for start in range(0, len(token_ids), _TOKENS_AT_ONCE)
        )

    def _piece(self, token_ids: Sequence[int]) -> str:
        text = self._text([*self._window, *token_ids])
        if text.endswith(_UNFINISHED):
            return "".join(map(self._token, token_ids))
        self._window.extend(token_ids)
        return self._settle_all(text)

    def _token(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text(self._window)
        if not text.endswith(_UNFINISHED):
            return self._settle_all(text)
        unfinished, unknown = len(text) - len(text.rstrip(_UNFINISHED)), self._num_unknown
        if unknown >= _MAX_CHARACTER_TOKENS:
            # These bytes are no text; the last of them may still begin a character.
            unfinished = min(unfinished, _MAX_UNFINISHED_SIGNS)
        settled = text[self._known_characters : len(text) - unfinished]
        self._known_characters += len(settled)
        if unknown >= _MAX_UNSETTLED_TOKENS:
            self._trim_window(_MAX_UNSETTLED_TOKENS)
            self._known_characters = len(self._text(self._window)) - unfinished
        return settled

    def _settle_all(self, text: str) -> str:
        settled = text[self._known_characters :]
        known_text = self._text(self._window[self._known_tokens :])
        # After tokens without text (special ones) a tokenizer treats the next as the first.
        if known_text or len(self._window) > _TOKENS_AT_ONCE:
            self._trim_window(self._num_unknown)
            self._known_characters = len(known_text)
        else:
            self._known_tokens, self._known_characters = len(self._window), len(text)
        return settled

    @property
    def _num_unknown(self) -> int:
        return len(self._window) - self._known_tokens

    def _trim_window(self, num_tokens: int) -> None:
        self._window = self._window[-num_tokens:]
        self._known_tokens = len(self._window)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._decode(np.array(token_ids, np.uint32))


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the stop string that begins first, or all of it without any."""
    positions = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(positions)] if positions else text


def stable_prefix(text: str, stops: Sequence[str]) -> str:
    """Return the part of an unfinished text that holds no stop string, nor the beginning of one.

    It only grows as the text grows, up to the first stop string.
    """
    reported = cut_at_stop(text, stops)
    if len(reported) < len(text):
        return reported
    num_held = max((_overlap(text, stop) for stop in stops), default=0)
    return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


class StopStringWatch:
    """Looks for stop strings in one response, token by token.

    Args:
        stops: at least one, none of them empty.
        decode: the tokenizer's `decode`.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._text = IncrementalDetokenizer(decode)
        self._num_kept = max(map(len, stops)) - 1
        self._tail = ""  # the end of the text, where a stop string may have begun

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take more tokens.

        Returns:
            How many of them belong to the response; the last one completes a stop string. ``None``
            without a stop string. Push nothing after one.
        """
        for place, token in enumerate(token_ids):
            self._tail += self._text.push((token,))
            if any(stop in self._tail for stop in self._stops):
                return place + 1
            self._tail = self._tail[-self._num_kept :] if self._num_kept else ""
        return None
