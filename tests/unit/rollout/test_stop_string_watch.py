"""Where a string ends a response, however its characters are cut into tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engines.text import Decode, StopStringWatch, before_stop, stable_prefix
from sluice.types import TokenIds

texts = st.text(st.sampled_from("abé€🙂"), max_size=30)
stop_lists = st.lists(st.text(st.sampled_from("abé🙂"), min_size=1, max_size=4), min_size=1)


def decode(token_ids: TokenIds) -> str:
    """Each token is a byte of UTF-8."""
    return bytes(token_ids.tolist()).decode("utf-8", errors="replace")


def spaced(token_ids: TokenIds) -> str:
    """Words, with spaces between them that no token holds."""
    return " ".join(f"w{token}" for token in token_ids.tolist())


def chunked(token_ids: TokenIds) -> str:
    """Each token is up to three bytes of UTF-8, whose length it has above them."""
    pieces = [token.to_bytes(4, "big") for token in token_ids.tolist()]
    joined = b"".join(piece[4 - piece[0] :] for piece in pieces)
    return joined.decode("utf-8", errors="replace")


def _chunk(piece: bytes) -> int:
    return int.from_bytes(bytes([len(piece)]) + piece.rjust(3, b"\0"), "big")


def _end(tokens: list[int], stops: list[str], decode: Decode) -> int | None:
    """By decoding the whole response after every token."""
    for count in range(1, len(tokens) + 1):
        text = decode(np.array(tokens[:count], np.uint32))
        if any(stop in text for stop in stops):
            return count
    return None


@given(texts, stop_lists, st.integers(1, 7))
def test_the_end_is_that_of_the_whole_text_decoded_after_every_token(
    text: str, stops: list[str], size: int
) -> None:
    tokens, found = list(text.encode()), None
    watch = StopStringWatch(stops, decode)
    for start in range(0, len(tokens), size):
        place = watch.push(tokens[start : start + size])
        if place is not None:
            found = start + place
            break
    assert found == _end(tokens, stops, decode)


@given(texts, stop_lists, st.data())
def test_a_token_that_begins_a_character_too_may_complete_a_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    rest, tokens = text.encode(), []
    while rest:
        size = data.draw(st.integers(1, 3))
        tokens.append(_chunk(rest[:size]))
        rest = rest[size:]
    assert StopStringWatch(stops, chunked).push(tokens) == _end(tokens, stops, chunked)


def test_a_stop_string_before_half_a_character_ends_at_once() -> None:
    watch = StopStringWatch(["b"], chunked)
    assert watch.push([_chunk(b"a"), _chunk("bé".encode()[:2]), _chunk(b"\xa9")]) == 2


def test_a_character_begun_in_the_last_token_of_the_one_before_is_seen() -> None:
    # Four tokens of one character, the last of which begins the next one.
    tokens = [_chunk(piece) for piece in (b"\xf0", b"\x9f", b"\x99", b"\x82\xc3", b"\xa9")]
    assert StopStringWatch(["é"], chunked).push(tokens) == 5


def test_text_between_tokens_counts() -> None:
    watch = StopStringWatch(["2 w3"], spaced)
    assert watch.push([1, 2]) is None
    assert watch.push([3, 4]) == 1


def test_bytes_that_are_no_text_hide_no_stop_string_for_ever() -> None:
    watch = StopStringWatch(["ab"], decode)
    assert watch.push([0xFF] * 9) is None
    assert watch.push(list(b"xab")) == 3


@given(texts, stop_lists)
def test_what_is_told_of_a_growing_text_stays_and_ends_before_the_stop_string(
    text: str, stops: list[str]
) -> None:
    reported = ""
    for size in range(len(text) + 1):
        grown = stable_prefix(text[:size], stops)
        assert grown.startswith(reported)
        reported = grown
        assert before_stop(text[:size], stops).startswith(reported)
        if any(stop in text[:size] for stop in stops):
            return  # it has ended


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [("one\ntwo", ("\n",), "one"), ("abcd", ("cd", "bcd"), "a"), ("abc", ("x",), "abc")],
)
def test_the_string_that_begins_first_cuts_the_text(
    text: str, stops: tuple[str, ...], before: str
) -> None:
    assert before_stop(text, stops) == before
