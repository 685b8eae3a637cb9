"""What is told of a growing response: whole characters, at a cost that does not grow with it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engines.text import IncrementalDetokenizer
from services.rollout.generation import StreamedText
from sluice.types import TokenIds

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
        self.most_tokens = 0

    def decode(self, token_ids: TokenIds) -> str:
        self.most_tokens = max(self.most_tokens, token_ids.size)
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
def test_a_response_that_is_continued_elsewhere_is_told_of_without_a_gap(
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
    assert tokenizer.most_tokens <= 24


def all_or_none(token_ids: TokenIds) -> str:
    """Each token is a byte; a sign for each of them where together they are no text, as tokenizers
    do that fall back to bytes."""
    data = bytes(token_ids.tolist())
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(data)


@given(st.text(st.sampled_from("ab€🙂é "), max_size=30), SIZES)
def test_text_is_told_of_whole_where_half_a_character_hides_those_before_it(
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
