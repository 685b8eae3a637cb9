"""The stream of data-set draws: complete, repeatable, resumable, and clear about bad data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.reward.prompts.dataset import (
    PromptStream,
    RowOrder,
    training_files,
    training_stream,
    validation_files,
    validation_stream,
)
from sluice.config.schema.data import DataConfig
from sluice.data.prompt_files import open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError
from sluice.types import DataProgress
from tests.support.prompt_parquet import prompt_rows, write_prompts

ROWS = 50
COLUMNS = PromptColumns()
START = DataProgress(0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    rows = prompt_rows([f"row {i}" for i in range(ROWS)])
    first = write_prompts(folder / "a.parquet", rows[:23], row_group_size=7)
    second = write_prompts(folder / "b.parquet", rows[23:], row_group_size=11)
    return [str(first), str(second)]


@pytest.fixture(scope="module")
def mixed_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same rows, the first of them as JSON lines."""
    folder = tmp_path_factory.mktemp("mixed")
    rows = prompt_rows([f"row {i}" for i in range(ROWS)])
    first = folder / "a.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows[:23]), encoding="utf-8")
    second = write_prompts(folder / "b.parquet", rows[23:], row_group_size=11)
    return [str(first), str(second)]


def stream(
    files: list[str],
    *,
    progress: DataProgress = START,
    epochs: int = 3,
    **order: Any,
) -> PromptStream:
    chosen = {"shuffle": True, "seed": 1, "window_rows": 8, "max_samples": None} | order
    chosen.setdefault("choose_at_random", chosen["shuffle"])
    opened = open_prompt_files(files, COLUMNS, config_key="data.train_files")
    return PromptStream(opened, RowOrder(**chosen), total_epochs=epochs, progress=progress)


def sampled(source: PromptStream, count: int = 10_000) -> list[tuple[int, int]]:
    return [(d.position, int(d.row.ground_truth)) for d in source.take(count)]


def test_unshuffled_rows_come_in_file_order_epoch_after_epoch(files: list[str]) -> None:
    assert sampled(stream(files, shuffle=False, epochs=2)) == [
        (p, p % ROWS) for p in range(2 * ROWS)
    ]


def test_every_epoch_draws_each_row_once_in_an_order_of_its_own(files: list[str]) -> None:
    rows = [row for _, row in sampled(stream(files))]
    epochs = [rows[i * ROWS : (i + 1) * ROWS] for i in range(3)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


def test_a_single_row_group_is_shuffled_again_in_every_epoch(tmp_path: Path) -> None:
    rows = prompt_rows([f"row {i}" for i in range(ROWS)])
    path = write_prompts(tmp_path / "one.parquet", rows, row_group_size=ROWS)
    order = [row for _, row in sampled(stream([str(path)], epochs=2, window_rows=ROWS))]
    assert order[:ROWS] != order[ROWS:]


def test_the_order_depends_on_the_seed_alone(files: list[str]) -> None:
    assert sampled(stream(files)) == sampled(stream(files))
    assert sampled(stream(files)) != sampled(stream(files, seed=2))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    low_water=st.integers(0, 3 * ROWS),
    above=st.sets(st.integers(0, 3 * ROWS), max_size=20),
    window=st.sampled_from([1, 8, 64]),
    block=st.sampled_from([1, 7, 1000]),
)
def test_a_resumed_stream_draws_what_the_unbroken_one_still_had_to(
    files: list[str], low_water: int, above: set[int], window: int, block: int
) -> None:
    progress = DataProgress(low_water, tuple(sorted(p for p in above if p >= low_water)))
    resumed = stream(files, progress=progress, window_rows=window)
    found: list[tuple[int, int]] = []
    while part := sampled(resumed, block):
        found += part
    unbroken = sampled(stream(files, window_rows=window))
    skipped = set(progress.ended_above)
    assert found == [d for d in unbroken if d[0] >= low_water and d[0] not in skipped]


def test_blocks_lose_no_draw(files: list[str]) -> None:
    source = stream(files)
    assert [d for _ in range(50) for d in sampled(source, 3)] == sampled(stream(files))


def test_json_lines_and_parquet_follow_each_other(mixed_files: list[str]) -> None:
    assert sampled(stream(mixed_files, shuffle=False, epochs=1)) == [(p, p) for p in range(ROWS)]
    shuffled = sampled(stream(mixed_files, epochs=2))
    assert [sorted(row for _, row in part) for part in (shuffled[:ROWS], shuffled[ROWS:])] == [
        list(range(ROWS))
    ] * 2
    assert sampled(stream(mixed_files, epochs=2, progress=DataProgress(61))) == shuffled[61:]


def copies(tmp_path: Path) -> DataConfig:
    """Twenty rows; each fifth is the same."""
    rows = [prompt_rows(["same"])[0] if i % 5 == 0 else row for i, row in enumerate(numbered(20))]
    path = write_prompts(tmp_path / "a.parquet", rows, row_group_size=6)
    return DataConfig(
        train_files=str(path), val_files=str(path), shuffle=False, seed=3, deduplicate=True
    )


def numbered(count: int) -> list[dict[str, object]]:
    return prompt_rows([f"row {i}" for i in range(count)])


def test_a_pattern_stands_for_its_files_by_name(files: list[str], tmp_path: Path) -> None:
    pattern = str(Path(files[0]).with_name("*.parquet"))

    named = training_files(DataConfig(train_files=files))
    assert training_files(DataConfig(train_files=pattern)) == named
    assert training_files(DataConfig(train_files=[pattern])) == named
    odd = Path(files[1]).rename(tmp_path / "b[1].parquet")  # a file's own name comes first
    try:
        alone = training_files(DataConfig(train_files=str(odd)))
    finally:
        odd.rename(files[1])
    assert alone is not None
    assert alone.num_rows == ROWS - 23
    with pytest.raises(DataError, match=r"no file .*none-\*\.parquet"):
        training_files(DataConfig(train_files=str(tmp_path / "none-*.parquet")))


def test_copies_are_taken_once_an_epoch_where_that_is_asked_for(tmp_path: Path) -> None:
    data = copies(tmp_path)
    opened = training_files(data)
    assert opened is not None
    source = training_stream(
        opened, data, total_epochs=2, progress=DataProgress(0), check_data_source=None
    )
    rows = [row for _, row in sampled(source)]
    expected = [0, *(i for i in range(20) if i % 5)]
    assert source.rows_per_epoch == len(expected)
    assert rows == expected * 2
    resumed = training_stream(
        opened, data, total_epochs=2, progress=DataProgress(20), check_data_source=None
    )
    assert [row for _, row in sampled(resumed)] == (expected * 2)[20:]


def test_max_samples_counts_rows_that_are_left_without_copies(tmp_path: Path) -> None:
    data = msgspec.structs.replace(copies(tmp_path), train_max_samples=7)
    opened = training_files(data)
    assert opened is not None
    source = training_stream(
        opened, data, total_epochs=1, progress=DataProgress(0), check_data_source=None
    )
    assert [row for _, row in sampled(source)] == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("validation_shuffle", [True, False])
def test_validation_is_chosen_as_training_and_ordered_on_its_own(
    files: list[str], shuffle: bool, validation_shuffle: bool
) -> None:
    data = DataConfig(
        val_files=files,
        seed=5,
        shuffle=shuffle,
        validation_shuffle=validation_shuffle,
        val_max_samples=20,
    )
    opened = validation_files(data)
    assert opened is not None
    rows, again = (
        [row for _, row in sampled(validation_stream(opened, data, None, None))] for _ in range(2)
    )
    assert rows == again
    assert (set(rows) == set(range(20))) is not shuffle
    assert (rows == sorted(rows)) is not validation_shuffle


@pytest.mark.parametrize("shuffle", [True, False])
def test_max_samples_uses_the_same_rows_in_every_epoch(files: list[str], shuffle: bool) -> None:
    source = stream(files, shuffle=shuffle, max_samples=20)
    rows = [row for _, row in sampled(source)]
    assert source.rows_per_epoch == 20
    assert set(rows[:20]) == set(rows[20:40]) == set(rows[40:])
    assert len(set(rows)) == 20
    assert (set(rows) == set(range(20))) is not shuffle


def test_a_row_keeps_all_that_scorers_need(files: list[str]) -> None:
    (draw,) = stream(files, shuffle=False).take(1)
    assert draw.row.messages[0].content == "row 0"
    assert (draw.row.data_source, draw.row.ground_truth) == ("math_dapo", "0")
    assert draw.row.extra_info == {"index": 0, "split": "train"}
    assert draw.row.place == f"{files[0]}, row 0"


def test_configured_keys_name_the_columns(tmp_path: Path) -> None:
    rows = [
        {"source": r["data_source"], "turns": r["prompt"], "reward_model": r["reward_model"]}
        for r in prompt_rows(["a", "b"])
    ]
    path = str(write_prompts(tmp_path / "a.parquet", rows))
    data = DataConfig(train_files=path, prompt_key="turns", reward_fn_key="source", shuffle=False)
    opened = training_files(data)
    assert opened is not None
    source = training_stream(
        opened, data, total_epochs=1, progress=DataProgress(0), check_data_source=None
    )
    assert [d.row.messages[0].content for d in source.take(9)] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["prompt"]), r"no column 'prompt' \(found: .*data\.prompt_key"),
        (lambda t: t.drop_columns(["data_source"]), "no column 'data_source'"),
        (lambda t: t.drop_columns(["reward_model"]), "no column 'reward_model'"),
        (lambda t: t.set_column(1, "prompt", pa.array(["x"])), "is string, not a list of"),
        (lambda t: t.set_column(0, "data_source", pa.array([1])), "not a string"),
        (
            lambda t: t.set_column(3, "reward_model", pa.array([{"style": "rule"}])),
            "is struct<style: string>, not a struct with a 'ground_truth'",
        ),
        (lambda t: t.slice(0, 0), "has no rows"),
    ],
)
def test_an_unusable_file_is_refused_before_any_row_is_read(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(change(pa.Table.from_pylist(prompt_rows(["x"]))), path)
    with pytest.raises(DataError, match=message) as error:
        open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    assert str(path) in str(error.value)


def test_what_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("not parquet")
    table, empty = tmp_path / "a.csv", tmp_path / "b.parquet"
    table.write_text("a,b")
    empty.touch()
    with pytest.raises(DataError, match=r"a\.parquet is no readable parquet file"):
        open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    with pytest.raises(DataError, match=rf"{tmp_path} is a folder; .* such as {tmp_path}/\*\.par"):
        open_prompt_files([str(tmp_path)], COLUMNS, config_key="data.train_files")
    with pytest.raises(DataError, match="no file /nowhere"):
        open_prompt_files(["/nowhere"], COLUMNS, config_key="data.train_files")
    with pytest.raises(DataError, match=r"a\.csv ends in '\.csv'; give a \.parquet"):
        open_prompt_files([str(table)], COLUMNS, config_key="data.train_files")
    with pytest.raises(DataError, match=r"b\.parquet is empty \(0 bytes\)"):
        open_prompt_files([str(empty)], COLUMNS, config_key="data.train_files")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", [], "'prompt' holds no message"),
        ("prompt", None, "'prompt' holds no message"),
        ("prompt", [{"role": "user", "content": None}], "without role or content"),
        ("data_source", None, "'data_source' is None"),
        ("reward_model", {"style": "rule", "ground_truth": None}, "ground_truth' is None"),
        ("reward_model", None, "ground_truth' is None"),
    ],
)
def test_a_bad_row_is_named_by_file_and_row(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    rows = prompt_rows(["a", "b", "c"])
    rows[1][field] = value
    path = write_prompts(tmp_path / "a.parquet", rows)
    source = stream([str(path)], shuffle=False)
    with pytest.raises(DataError, match=message) as error:
        source.take(3)
    assert f"{path}, row 1" in str(error.value)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_data_set_that_holds_images_is_refused(tmp_path: Path, suffix: str) -> None:
    rows = [{**row, "images": ["a.png"]} for row in prompt_rows(["<image> how many?", "more"])]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    data = DataConfig(train_files=str(path))
    with pytest.raises(DataError, match=r"holds images \(column 'images'\).*text-only"):
        training_files(data)
    assert training_files(msgspec.structs.replace(data, image_key="others")) is not None


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_images_of_a_later_row_are_refused_before_it_is_trained_on(
    tmp_path: Path, suffix: str
) -> None:
    rows = [{**row, "images": []} for row in prompt_rows(["a", "<image> how many?"])]
    rows[1]["images"] = ["a.png"]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    data = DataConfig(train_files=str(path), shuffle=False)
    with pytest.raises(DataError, match=rf"a\.{suffix}, row 1 holds images"):
        issue_all(data)


def issue_all(data: DataConfig) -> None:
    files = training_files(data)
    assert files is not None
    training_stream(
        files, data, total_epochs=1, progress=DataProgress(0), check_data_source=None
    ).take(10)
