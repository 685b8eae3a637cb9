"""Stop strings, however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.openai_front.stop_strings import StopStrings

# Few letters, so that stop strings occur and overlap.
TEXT = st.text("ab\n", max_size=20)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


@given(st.lists(TEXT, max_size=8), STOPS)
def test_the_text_ends_before_the_earliest_stop_string_wherever_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    filtered = StopStrings(stops)
    passed = ""
    for piece in pieces:
        passed += filtered.push(piece)
        # Nothing that a stop string may still begin in was passed on.
        assert text[: min(found)].startswith(passed) if found else text.startswith(passed)
    assert filtered.is_stopped == bool(found)
    assert passed + filtered.flush() == (text[: min(found)] if found else text)


@given(st.lists(TEXT, max_size=8))
def test_without_stop_strings_everything_is_passed_on_at_once(pieces: list[str]) -> None:
    filtered = StopStrings(())
    assert [filtered.push(piece) for piece in pieces] == pieces


def test_only_what_a_stop_string_may_begin_with_is_held_back() -> None:
    filtered = StopStrings(("END",))
    assert filtered.push("the E") == "the "
    assert filtered.push("N") == ""
    assert filtered.push("T") == "ENT"
