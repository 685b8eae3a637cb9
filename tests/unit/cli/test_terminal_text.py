"""Model text on a terminal: shown, never obeyed."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli.policy import generate as generate_module
from sluice.cli.terminal import printable
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
    rollout = Rollout(
        0,
        np.zeros(1, np.uint32),
        np.zeros(1, np.float32),
        (VersionSpan(3, 0, 1),),
        FinishReason.STOP,
        "\x1b]0;title\x07",
    )

    client = AsyncMock()
    client.__aenter__.return_value.generate.return_value = Mock(rollouts=[rollout])
    monkeypatch.setattr(generate_module, "ask_run", AsyncMock())
    monkeypatch.setattr(generate_module.AsyncClient, "connect", lambda _: client)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    generate_module.generate("hello", run=Path("unused"))
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["[0] version 3 (stop)", r"\x1b]0;title\x07" if is_terminal else rollout.text]
