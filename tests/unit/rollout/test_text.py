"""The text of a growing response: what can be sent of it, and the stop string that ends it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engines.text import (
    Decode,
    IncrementalDetokenizer,
    StopStringWatch,
    cut_at_stop,
    stable_prefix,
)
from services.rollout.generation import StreamedText
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
    # Four tokens of one character; the last token begins the next one.
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
def test_what_is_sent_of_a_growing_text_stays_and_ends_before_the_stop_string(
    text: str, stops: list[str]
) -> None:
    reported = ""
    for size in range(len(text) + 1):
        grown = stable_prefix(text[:size], stops)
        assert grown.startswith(reported)
        reported = grown
        assert cut_at_stop(text[:size], stops).startswith(reported)
        if any(stop in text[:size] for stop in stops):
            return  # it has ended


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [("one\ntwo", ("\n",), "one"), ("abcd", ("cd", "bcd"), "a"), ("abc", ("x",), "abc")],
)
def test_the_string_that_begins_first_cuts_the_text(
    text: str, stops: tuple[str, ...], before: str
) -> None:
    assert cut_at_stop(text, stops) == before


# Characters of one to four bytes, and bytes that are none.
PIECES = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab€🙂é "), max_size=3).map(str.encode),
        st.binary(max_size=3),
        st.just(b"\xff" * 7),
    ),
    max_size=8,
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


class Utf8:
    """Each token is a byte of UTF-8."""

    def __init__(self) -> None:
        self.max_tokens = 0

    def decode(self, token_ids: TokenIds) -> str:
        self.max_tokens = max(self.max_tokens, token_ids.size)
        return bytes(token_ids.tolist()).decode("utf-8", errors="replace")


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    while start < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(tokens[start : start + size])
        start += size
    return pieces


@given(PIECES, SIZES)
def test_what_is_settled_depends_on_the_tokens_and_not_on_how_they_came(
    pieces: list[bytes], sizes: list[int]
) -> None:
    tokens = list(b"".join(pieces))
    in_pieces, at_once = (
        IncrementalDetokenizer(Utf8().decode),
        IncrementalDetokenizer(Utf8().decode),
    )
    assert "".join(map(in_pieces.push, cut(tokens, sizes))) == at_once.push(tokens)


@given(PIECES, SIZES)
def test_what_is_settled_begins_the_whole_text_and_lacks_no_whole_character(
    pieces: list[bytes], sizes: list[int]
) -> None:
    tokens = list(b"".join(pieces))
    text = IncrementalDetokenizer(Utf8().decode)
    settled = "".join(map(text.push, cut(tokens, sizes)))
    whole = Utf8().decode(np.array(tokens, np.uint32))
    assert whole.startswith(settled)
    assert len(settled) >= len(whole.rstrip("\ufffd"))


@given(PIECES, SIZES, st.integers(0, 60))
def test_a_response_that_is_continued_elsewhere_is_sent_without_a_gap(
    pieces: list[bytes], sizes: list[int], place: int
) -> None:
    tokens = list(b"".join(pieces))
    here, there = StreamedText(("ab",), Utf8().decode), StreamedText(("ab",), Utf8().decode)
    reported = "".join(map(here.push, cut(tokens[:place], sizes)))
    there.push(tokens[:place])
    reported += "".join(map(there.push, cut(tokens[place:], sizes)))
    unbroken = StreamedText(("ab",), Utf8().decode)
    assert reported == "".join(map(unbroken.push, cut(tokens, sizes)))


@given(st.sampled_from([b"a", b"\xff", "🙂".encode(), b"\xe2"]))
def test_each_token_is_decoded_with_a_few_others_only(piece: bytes) -> None:
    tokenizer = Utf8()
    text = StreamedText((), tokenizer.decode)
    for token in (piece * 200)[:200]:
        text.push([token])
    assert tokenizer.max_tokens <= 24


def all_or_none(token_ids: TokenIds) -> str:
    """Each token is a byte; a sign for each of them where together they are no text, as tokenizers
    do that fall back to bytes."""
    data = bytes(token_ids.tolist())
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)


@given(st.text(st.sampled_from("ab€🙂é "), max_size=30), SIZES)
def test_text_is_sent_whole_where_half_a_character_hides_those_before_it(
    text: str, sizes: list[int]
) -> None:
    reported = StreamedText((), all_or_none)
    assert "".join(map(reported.push, cut(list(text.encode()), sizes))) == text


def sentence_pieces(token_ids: TokenIds) -> str:
    """Each token is a word with a space before it, which the first one loses; 0 has no text."""
    return "".join(f" w{token}" for token in token_ids.tolist() if token).removeprefix(" ")


@given(st.lists(st.integers(0, 3), max_size=20), SIZES)
def test_a_token_without_text_takes_no_space_from_the_next(
    tokens: list[int], sizes: list[int]
) -> None:
    reported = StreamedText((), sentence_pieces)
    whole = sentence_pieces(np.array(tokens, np.uint32))
    assert "".join(map(reported.push, cut(tokens, sizes))) == whole
