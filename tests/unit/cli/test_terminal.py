"""Arguments, tables and texts of others on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import sys
import unicodedata
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sluice import __main__ as entry
from sluice.cli.arguments import split_arguments
from sluice.cli.policy import generate as generate_module
from sluice.cli.terminal import output_console, print_json, print_table, show_count
from sluice.safe_text import printable
from sluice.types import FinishReason, Rollout, VersionSpan


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("50%\rdone", r"50%\rdone"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("a\N{RIGHT-TO-LEFT OVERRIDE}b", r"a\u202eb"),
        ("lone \ud800", r"lone \ud800"),
        ("two\n\tlines, naïve 数学 👍", "two\n\tlines, naïve 数学 👍"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_printed_for_programs_is_json_whatever_the_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json({"b": [float("nan"), 1.5], "a": {"c": -float("inf")}})
    assert capsys.readouterr().out == '{"a": {"c": null}, "b": [null, 1.5]}\n'


@given(st.text())
def test_no_control_character_but_newline_and_tab_is_left(text: str) -> None:
    left = {character for character in printable(text) if unicodedata.category(character) == "Cc"}
    assert left <= {"\n", "\t"}


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_text_without_control_characters_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generate_escapes_for_a_terminal_and_leaves_a_pipe_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_terminal: bool
) -> None:
    rollout = Rollout.of_one_turn(
        0,
        np.zeros(1, np.uint32),
        np.zeros(1, np.float32),
        (VersionSpan(3, 0, 1),),
        FinishReason.STOP,
        "\x1b]0;title\x07",
    )

    client = AsyncMock()
    client.__aenter__.return_value.generate.return_value = Mock(rollouts=[rollout])
    monkeypatch.setattr(generate_module, "connect_client", lambda _: client)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    generate_module.generate("hello", run=Path("unused"))
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["[0] version 3 (stop)", r"\x1b]0;title\x07" if is_terminal else rollout.text]


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


@pytest.mark.parametrize(
    ("arguments", "file", "overrides"),
    [
        ([], None, []),
        (["run.yaml"], "run.yaml", []),
        (["run.yaml", "data.seed=3"], "run.yaml", ["data.seed=3"]),
        (["data.seed=3", "trainer.seed=4"], None, ["data.seed=3", "trainer.seed=4"]),
        (["+data.seed=3"], None, ["+data.seed=3"]),
        (["~data.seed"], None, ["~data.seed"]),
    ],
)
def test_the_first_argument_is_the_file_unless_it_is_an_override(
    arguments: list[str], file: str | None, overrides: list[str]
) -> None:
    assert split_arguments(arguments) == (file and Path(file), overrides)


def test_a_file_that_is_there_is_the_file_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "lr=1e-3.yaml"
    file.touch()
    assert split_arguments([str(file), "data.seed=3"]) == (file, ["data.seed=3"])


def test_a_count_into_a_file_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = [0.0]
    with show_count("simulating", 40, clock=lambda: now_s[0]) as advance:
        for _ in range(20):
            now_s[0] += 1.0
            advance(2)
    assert capsys.readouterr().err.splitlines() == [
        f"simulating: {done}/40" for done in (10, 20, 30, 40)
    ]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of a locale, of LANG=C
def test_what_the_output_cannot_encode_is_printed_as_an_escape(
    errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii", errors))
    monkeypatch.setattr(sys, "argv", ["sluice"])
    monkeypatch.setattr(
        "sluice.cli.main.app", lambda: sys.stdout.write(f"naïve {os.fsdecode(bytes([255]))}\n")
    )
    entry.app()
    sys.stdout.flush()
    assert output.getvalue() == b"na\\xefve \\udcff\n"
