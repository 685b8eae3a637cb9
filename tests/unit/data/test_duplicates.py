"""Rows with the same messages and ground truth are found across files of both formats."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.data.duplicates import first_rows, row_digests, without_duplicates
from sluice.data.prompt_files import PromptFiles, open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from tests.support.prompt_parquet import prompt_rows, write_prompts


def row(content: str, truth: str) -> dict[str, object]:
    (made,) = prompt_rows([content])
    return made | {"reward_model": {"style": "rule", "ground_truth": truth}}


def opened(*paths: Path) -> PromptFiles:
    return open_prompt_files([str(path) for path in paths], PromptColumns(), config_key="files")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kinds=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12")), min_size=1))
def test_the_first_row_of_each_kind_stays(tmp_path: Path, kinds: list[tuple[str, str]]) -> None:
    rows = [row(*kind) for kind in kinds]
    expected = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    parquet = write_prompts(tmp_path / "a.parquet", rows, row_group_size=3)
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    for path in (parquet, lines):
        kept = without_duplicates(opened(path)).kept
        assert kept is not None
        assert kept.tolist() == expected


def test_the_whole_conversation_counts(tmp_path: Path) -> None:
    turns = [
        [("user", "a")],
        [("system", "a")],
        [("system", "s"), ("user", "a")],
        [("user", "a"), ("system", "s")],
    ]
    rows = [
        row("", "1") | {"prompt": [{"role": role, "content": text} for role, text in one]}
        for one in turns
    ]
    path = write_prompts(tmp_path / "a.parquet", rows)
    assert first_rows(row_digests(opened(path))).tolist() == [0, 1, 2, 3]


def test_a_copy_in_another_file_is_a_copy(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "a.parquet", [row("a", "1"), row("b", "1")])
    second = write_prompts(tmp_path / "b.parquet", [row("b", "1"), row("c", "1")])
    assert first_rows(row_digests(opened(first, second))).tolist() == [0, 1, 3]
