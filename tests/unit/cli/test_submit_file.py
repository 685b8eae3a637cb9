"""The file of prompts to submit: one error naming file, line and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.submit import read_prompts
from sluice.errors import DataError

GOOD = (
    '{"prompt_id": "a1", "prompt": [{"role": "user", "content": "2 + 2?"}], '
    '"data_source": "math_dapo", "ground_truth": "4"}'
)


def test_prompts_are_read_in_order_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{GOOD}\n\n{GOOD.replace('a1', 'a2')}\n")
    prompts = read_prompts(file)
    assert [prompt.prompt_id for prompt in prompts] == ["a1", "a2"]
    assert prompts[0].messages[0].content == "2 + 2?"
    assert prompts[0].ground_truth == "4"


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(GOOD.replace("2 + 2?", "2 +\u2028 2?"), encoding="utf-8")
    assert read_prompts(file)[0].messages[0].content == "2 +\u2028 2?"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: Expected `object`"),
        (GOOD.replace('"prompt_id": "a1", ', ""), "line 2: .*`prompt_id`"),
        (GOOD.replace('"4"', "4"), r"line 2: Expected `str`, got `int` - at `\$.ground_truth`"),
        (GOOD.replace('"role": "user", ', ""), r"line 2: .*`role` - at `\$.prompt\[0\]`"),
        (GOOD.replace('[{"role": "user", "content": "2 + 2?"}]', '"hi"'), r"line 2: .*\$.prompt"),
    ],
)
def test_a_bad_line_is_named_with_what_it_needs(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(DataError, match=named) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(str(file))
    assert "a line needs prompt_id, prompt" in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(GOOD.encode().replace(b"a1", b"\xff"))
    with pytest.raises(DataError, match="line 1: "):
        read_prompts(file)


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match="no such file" if content is None else "holds no prompt"):
        read_prompts(file)
