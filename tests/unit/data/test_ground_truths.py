"""A row's ground truth is text or another value of JSON, as verl passes it to reward functions."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.reward.grading.scorers.registry import scorer_for
from services.reward.ledger.schema import decode_prompt, encode_body
from services.reward.prompts.dataset import DataSourceCheck, IssuedRow, PromptStream, RowOrder
from services.reward.records.stored_prompts import BenchmarkFile, PromptStore
from sluice.codec.reward import row_json
from sluice.data.inspection import inspect_files
from sluice.data.prompt_files import PromptFiles, open_prompt_files, without_duplicates
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError
from sluice.types import DataProgress, Prompt
from tests.support.prompt_parquet import prompt_rows

SUFFIXES = ("parquet", "jsonl")
VALUES = [
    (72, "72"),
    (72.0, "72.0"),
    (True, "true"),
    ([1, 2], "[1, 2]"),
    ({"target": ["Orléans", "Paris"]}, '{"target": ["Orléans", "Paris"]}'),
    ({"a": {"b": [0.5]}}, '{"a": {"b": [0.5]}}'),
    ({"target": 10, "numbers": [4, 6]}, '{"target": 10, "numbers": [4, 6]}'),
]


def opened(folder: Path, suffix: str, *truths: object) -> PromptFiles:
    rows = prompt_rows(["?"] * len(truths))
    for row, truth in zip(rows, truths, strict=True):
        row["reward_model"] = {"style": "rule", "ground_truth": truth}
    path = folder / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return open_prompt_files([str(path)], PromptColumns(), config_key="data.train_files")


def stream(files: PromptFiles, check: DataSourceCheck | None = None) -> PromptStream:
    order = RowOrder(shuffle=False, seed=1, window_rows=8, max_samples=None, choose_at_random=False)
    return PromptStream(
        files, order, total_epochs=1, progress=DataProgress(0), check_data_source=check
    )


def issued(files: PromptFiles) -> list[IssuedRow]:
    return stream(files).take(9)


def first_prompt(folder: Path, suffix: str, truth: object) -> Prompt:
    (row,) = issued(opened(folder, suffix, truth))
    return row.prompt("data-0", 0)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("value", "text"), VALUES)
def test_a_ground_truth_of_any_json_reaches_the_prompt_as_text_and_as_its_value(
    tmp_path: Path, suffix: str, value: object, text: str
) -> None:
    prompt = first_prompt(tmp_path, suffix, value)
    assert prompt.ground_truth == text
    assert prompt.truth == value
    assert type(prompt.truth) is type(value)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("text", ["72", "[1, 2]", '{"target": ["a"]}'])
def test_a_text_stays_that_text_whatever_it_looks_like(
    tmp_path: Path, suffix: str, text: str
) -> None:
    prompt = first_prompt(tmp_path, suffix, text)
    assert (prompt.ground_truth, prompt.truth) == (text, text)


@pytest.mark.parametrize(
    "value", [None, b"72", datetime.date(2024, 1, 2), float("nan"), {"at": [b"1"]}]
)
def test_what_json_does_not_know_is_refused_with_file_and_row(
    tmp_path: Path, value: object
) -> None:
    files = opened(tmp_path, "parquet", value)
    with pytest.raises(DataError, match=r"a\.parquet, row 0: 'reward_model\.ground_truth' is "):
        issued(files)
    assert inspect_files(files).num_bad == 1
    assert without_duplicates(files).num_rows == 1


def test_environments_get_the_value(tmp_path: Path) -> None:
    prompt = first_prompt(tmp_path, "jsonl", {"target": ["a"]})
    assert json.loads(row_json(prompt))["ground_truth"] == {"target": ["a"]}


@pytest.mark.parametrize("truth", ["1", 1, {"target": ["a"]}])
def test_the_ledger_gives_a_prompt_back_with_its_value(tmp_path: Path, truth: object) -> None:
    prompt = first_prompt(tmp_path, "jsonl", truth)
    back = decode_prompt("data-0", 0, 0, encode_body(prompt))
    assert (back.ground_truth, back.truth) == (prompt.ground_truth, truth)


def test_the_ledgers_bytes_of_a_text_are_those_of_earlier_versions(tmp_path: Path) -> None:
    # A client that sends a prompt again after an update is known by the digest of these.
    prompt = first_prompt(tmp_path, "jsonl", "[1]")
    fields = msgspec.msgpack.decode(encode_body(prompt))
    assert fields == [[["user", "?"]], "math_dapo", "[1]", prompt.extra_info, prompt.place, [], ""]


def test_a_row_whose_scorer_cannot_compare_with_its_value_is_refused_by_name(
    tmp_path: Path,
) -> None:
    files = opened(tmp_path, "jsonl", ["7"])

    def check(_source: str, json_truth: str) -> None:
        scorer_for("openai/gsm8k", json_truth=json_truth)

    with pytest.raises(DataError, match=r"a\.jsonl, row 0: .*ground_truth is \[\"7\"\]"):
        stream(files, check).take(1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_with_other_values_are_no_copies(tmp_path: Path, suffix: str) -> None:
    files = opened(tmp_path, suffix, ["a"], ["b"], ["a"])
    assert inspect_files(files).num_duplicates == 1
    kept = without_duplicates(files).kept
    assert kept is not None
    assert kept.tolist() == [0, 1]


async def test_an_evaluation_stores_the_value(tmp_path: Path) -> None:
    prompt = first_prompt(tmp_path, "jsonl", {"target": ["a"]})
    await PromptStore([BenchmarkFile(0, tmp_path / "b.jsonl")]).add(prompt, None, ())
    assert json.loads((tmp_path / "b.jsonl").read_text())["ground_truth"] == {"target": ["a"]}
