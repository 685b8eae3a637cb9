"""Rows with the same messages and ground truth are found across files of both formats."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.data.inspection import inspect_files
from sluice.data.prepare import PrepareJob, PrepareOptions, prepare
from sluice.data.prompt_files import (
    PromptFiles,
    open_prompt_files,
    row_digests,
    without_duplicates,
)
from sluice.data.prompt_rows import PromptColumns
from sluice.data.row_files import digest_of
from tests.support.prompt_parquet import prompt_rows, write_prompts


def row(content: str, truth: str) -> dict[str, object]:
    (made,) = prompt_rows([content])
    return made | {"reward_model": {"style": "rule", "ground_truth": truth}}


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    if path.suffix == ".parquet":
        return write_prompts(path, rows)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


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


def kept_rows(files: PromptFiles) -> list[int]:
    kept = without_duplicates(files).kept
    assert kept is not None
    return [int(row) for row in kept]


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
    assert kept_rows(opened(path)) == [0, 1, 2, 3]


def test_mappings_that_are_equal_are_the_same_ground_truth(tmp_path: Path) -> None:
    truths = [{"inputs": [1], "outputs": [2]}, {"outputs": [2], "inputs": [1]}, {"outputs": [2]}]
    rows = [row("a", "") | {"reward_model": {"ground_truth": truth}} for truth in truths]
    assert kept_rows(opened(written(tmp_path / "a.jsonl", rows))) == [0, 2]


def test_a_copy_in_another_file_is_a_copy(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "a.parquet", [row("a", "1"), row("b", "1")])
    second = write_prompts(tmp_path / "b.parquet", [row("b", "1"), row("c", "1")])
    assert kept_rows(opened(first, second)) == [0, 1, 3]


SPELLINGS: dict[str, list[dict[str, object]]] = {
    "plain": [{"role": "user", "content": "é?"}],
    "keys in another order": [{"content": "é?", "role": "user"}],
    "a further key": [{"role": "user", "content": "é?", "name": "x"}],
    "a further key without a value": [{"tool_calls": None, "content": "é?", "role": "user"}],
}


@pytest.mark.parametrize("other", SPELLINGS)
@pytest.mark.parametrize(("first", "second"), [*product(("parquet", "jsonl"), repeat=2)])
def test_a_row_written_in_another_way_is_a_copy_for_everyone_who_looks(
    tmp_path: Path, first: str, second: str, other: str
) -> None:
    rows = [row("", "1") | {"prompt": SPELLINGS[name]} for name in ("plain", other)]
    paths = (
        written(tmp_path / f"a.{first}", [row("b", "1"), rows[0]]),
        written(tmp_path / f"b.{second}", [rows[1], row("b", "2")]),
    )
    files = opened(*paths)
    kept = without_duplicates(files).kept
    assert kept is not None
    assert kept.tolist() == [0, 1, 3]
    assert inspect_files(files).num_duplicates == 1
    output = tmp_path / "made.parquet"
    order = PrepareJob("jsonl", paths, output, PrepareOptions("train", "mine"), deduplicate=True)
    assert prepare(order).num_duplicates == 1


def test_all_who_look_for_copies_take_the_same_digest(tmp_path: Path) -> None:
    digest = digest_of(["user"], ["a"], "1")
    for suffix in ("parquet", "jsonl"):
        path = written(tmp_path / f"a.{suffix}", [row("a", "1")])
        assert row_digests(opened(path)).tolist() == [digest]


TEXTS = st.text(alphabet="0:1-a", max_size=3)


@given(
    rows=st.lists(
        st.tuples(st.lists(st.tuples(TEXTS, st.none() | TEXTS), max_size=2), st.none() | TEXTS),
        min_size=2,
        max_size=2,
    )
)
def test_only_equal_rows_have_equal_digests(
    rows: list[tuple[list[tuple[str, str | None]], str | None]],
) -> None:
    one, other = (
        digest_of([role for role, _ in turns], [content for _, content in turns], truth)
        for turns, truth in rows
    )
    assert (one == other) == (rows[0] == rows[1])
