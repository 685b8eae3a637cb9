"""Lines of a file that grows: each once, whole, in bounded pieces."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.dashboard.line_tail import LineTail


def taken(tail: LineTail) -> list[bytes]:
    """All that is there."""
    found = []
    while True:
        one = tail.read_new_lines()
        found += [line.text for line in one.lines]
        if not one.has_more:
            return found


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(content)


def test_a_torn_last_line_is_left_for_the_next_look(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = LineTail(file)
    assert taken(tail) == []
    append(file, b'{"step": 1}\n{"ste')
    assert taken(tail) == [b'{"step": 1}']
    assert taken(tail) == []
    append(file, b'p": 2}\n')
    assert taken(tail) == [b'{"step": 2}']


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"-")), max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    chunk=st.integers(1, 30),
)
def test_however_a_file_grows_every_line_comes_once_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int], chunk: int
) -> None:
    file = tmp_path_factory.mktemp("tail") / "lines"
    content = b"".join(line + b"\n" for line in lines)
    tail, found = LineTail(file, chunk_bytes=chunk), []
    bounds = sorted({0, *(min(cut, len(content)) for cut in cuts), len(content)})
    for begin, end in pairwise(bounds):
        append(file, content[begin:end])
        more = True
        while more:
            one = tail.read_new_lines()
            found += one.lines
            more = one.has_more
    assert [line.text for line in found] == lines
    for line in found:
        assert content[line.offset : line.offset + len(line.text)] == line.text


@pytest.mark.parametrize("how", ["replaced", "cut short", "rewritten in place", "deleted"])
def test_a_file_that_is_another_is_read_from_its_beginning(tmp_path: Path, how: str) -> None:
    file = tmp_path / "lines"
    append(file, b"first\nsecond\n")
    tail = LineTail(file)
    taken(tail)
    if how == "replaced":
        (tmp_path / "other").write_bytes(b"first\nsecond\nthird\n")
        (tmp_path / "other").replace(file)
    elif how == "cut short":
        file.write_bytes(b"new\n")
    elif how == "rewritten in place":
        file.write_bytes(b"a line that is longer than both\n")
    else:
        file.unlink()
    one = tail.read_new_lines()
    assert one.is_reset
    assert [line.text for line in one.lines] == (
        file.read_bytes().splitlines() if file.exists() else []
    )


def test_a_line_beyond_the_bound_is_left_out_and_counted_and_the_next_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "lines"
    tail = LineTail(file, chunk_bytes=8, max_line_bytes=32)
    append(file, b"short\n" + b"x" * 100)
    assert taken(tail) == [b"short"]
    append(file, b"x" * 100 + b"\nlast\n")
    assert taken(tail) == [b"last"]
    assert tail.num_left_out == 1
    file.unlink()
    append(file, b"of another file\n")
    assert taken(tail) == [b"of another file"]
