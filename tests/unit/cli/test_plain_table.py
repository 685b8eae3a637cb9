"""Tables on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sluice.cli.terminal import output_console, print_table

ROWS = [("short", "1"), ("a key that is longer than the terminal is wide", "20,000")]


def printed(console: Console) -> str:
    file = io.StringIO()
    console.file = file
    print_table(console, "title", ("name", "count"), ROWS, right=("count",))
    return file.getvalue()


def test_a_pipe_gets_one_bare_line_for_each_row() -> None:
    text = printed(Console(width=200, force_terminal=False))
    long = ROWS[1][0]
    assert text.splitlines() == [
        "title",
        f"{'name':<{len(long)}}   count",
        f"{'short':<{len(long)}}       1",
        f"{long}  20,000",
        "",
    ]


def test_a_terminal_gets_styles_and_no_line_wider_than_itself() -> None:
    text = printed(Console(width=30, force_terminal=True, color_system="standard"))
    assert "\x1b[1mtitle" in text
    plain = printed(Console(width=30, force_terminal=True, color_system=None))
    assert max(len(line) for line in plain.splitlines()) <= 30
    assert "20,000" in plain


def test_standard_output_that_is_no_terminal_is_never_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert output_console().width > 1000
