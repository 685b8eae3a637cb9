"""The file of prompts to submit: one error naming file, line and what is wrong."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.cli.policy.submit import read_prompts
from sluice.client.submission import prompt_to_proto
from sluice.errors import DataError
from tests.support.image_files import png

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
        (GOOD.replace('"data_source": "math_dapo", ', ""), "line 2: .*`data_source`"),
        (GOOD.replace(', "ground_truth": "4"', ""), "line 2: no ground_truth"),
        (GOOD.replace('"4"', "4"), r"line 2: Expected `str \| null`.* - at `\$.ground_truth`"),
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
    assert "needs prompt ([{role, content}]), data_source and ground_truth" in str(caught.value)


def test_two_prompts_under_one_id_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\n")
    first, second = read_prompts(file)
    assert first == second
    file.write_text(f"{GOOD}\n{GOOD.replace('2 + 2?', '2 + 3?')}\n")
    with pytest.raises(DataError, match=r"line 2: an earlier row with other content has .* 'a1'"):
        read_prompts(file)


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
    with pytest.raises(DataError, match="no such file" if content is None else "holds no row"):
        read_prompts(file)


ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "math_dapo",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3, "split": "train"},
    "ability": "math",
}


def test_rows_of_a_training_set_can_be_submitted(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([ROW, ROW]), file)
    first, second = read_prompts(file)
    assert first.ground_truth == "4"
    assert first.extra_info == {"index": 3, "split": "train"}
    assert first.messages[0].content == "2 + 2?"
    assert first.prompt_id != second.prompt_id


def test_a_made_id_is_the_same_for_the_same_row_and_another_for_any_other(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    line = json.dumps(ROW)
    file.write_text(f"{line}\n")
    (before,) = read_prompts(file)
    file.write_text(f"{line}\n{line.replace('2 + 2', '2 + 3')}\n")
    again, other = read_prompts(file)
    assert again == before
    assert other.prompt_id != before.prompt_id
    assert len(before.prompt_id) <= 128
    file.write_text(line.replace("train", "test"))
    assert read_prompts(file)[0].prompt_id != before.prompt_id


def test_a_row_that_is_wrong_and_a_file_that_is_no_parquet_are_named(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([ROW, {**ROW, "data_source": None}]), file)
    with pytest.raises(DataError, match=r"train\.parquet, row 1: Expected `str`, got `null`"):
        read_prompts(file)
    file.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"train\.parquet: cannot be read as parquet"):
        read_prompts(file)


def test_a_submitted_row_keeps_what_plays_it(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    rows = [ROW | {"agent_name": "single_turn_agent"}, ROW | {"agent_name": None}]
    pq.write_table(pa.Table.from_pylist(rows), file)
    chosen, free = read_prompts(file)
    assert chosen.extra_info == {**ROW["extra_info"], "agent_name": "single_turn_agent"}
    assert free.extra_info == ROW["extra_info"]


@pytest.mark.parametrize("column", ["videos", "audios"])
def test_a_submitted_row_with_other_media_is_refused(tmp_path: Path, column: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(ROW | {column: ["a.mp4"]}), encoding="utf-8")
    with pytest.raises(DataError, match=f"holds {column}, and no run reads them"):
        read_prompts(file)


@pytest.mark.parametrize("lost", ["tool_calls", "reasoning_content"])
def test_a_message_with_more_than_role_and_content_is_refused(tmp_path: Path, lost: str) -> None:
    file = tmp_path / "prompts.jsonl"
    turn = {"role": "assistant", "content": "x", lost: [{}]}
    file.write_text(json.dumps({**ROW, "prompt": [turn]}))
    with pytest.raises(DataError, match=rf"jsonl, line 1: 'prompt' holds a message with {lost}"):
        read_prompts(file)


def test_images_are_beside_the_file_or_in_the_row(tmp_path: Path) -> None:
    data = b64encode(png()).decode()
    row = {**ROW, "prompt": [{"role": "user", "content": "<image>" * 3}]}
    row["images"] = ["a.png", {"bytes": data}, f"data:image/png;base64,{data}"]
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    pq.write_table(
        pa.Table.from_pylist([{**row, "images": [{"bytes": png(), "path": None}] * 3}]),
        tmp_path / "prompts.parquet",
    )
    for name in ("prompts.jsonl", "prompts.parquet"):
        (prompt,) = read_prompts(tmp_path / name)
        assert list(prompt_to_proto(prompt).images) == [png()] * 3


@pytest.mark.parametrize("image", [7, "", {"bytes": "!"}, {"path": None}, "data:image/png,x"])
def test_an_image_that_is_none_is_named_by_file_and_line(tmp_path: Path, image: object) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({**ROW, "images": [image]}))
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 1: images\[0\] "):
        read_prompts(file)


def test_rows_keep_the_ids_of_earlier_releases(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(ROW))
    assert read_prompts(file)[0].prompt_id == "prompts:line-1:ec8dd895c70f4cf7"


def test_rows_without_images_keep_the_ids_they_had(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    ids = []
    for images in ({}, {"images": None}, {"images": []}, {"images": ["a.png"]}):
        file.write_text(json.dumps({**ROW, **images}))
        ids.append(read_prompts(file)[0].prompt_id)
    assert len({*ids[:3]}) == 1
    assert ids[3] != ids[0]
