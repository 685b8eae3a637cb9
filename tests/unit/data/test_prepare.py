"""Published data sets become rows of verl's format that the loop can read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.data.prepare import (
    PUBLISHED_SETS,
    ROWS_PER_GROUP,
    PrepareJob,
    PrepareOptions,
    PrepareResult,
    last_boxed,
    prepare,
)
from sluice.data.prompt_files import ChunkReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns, PromptRow
from sluice.data.scoring import scorer_name
from sluice.errors import DataError
from tests.support.prompt_parquet import prompt_rows

IMAGE = {"bytes": b"png", "path": None}
DAPO_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve. 1 + 1?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
ORIGINALS: dict[str, dict[str, Any]] = {
    "dapo-math-17k": DAPO_ROW,
    "aime-2024": {"id": 60, "problem": "1 + 1?", "answer": 2, "year": 2024},
    "math-500": {
        "problem": "1 + 1?",
        "solution": r"It is $\boxed{2}$.",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/1.json",
    },
    "gsm8k": {"question": "1 + 1?", "answer": "one and one <<1+1=2>>\n#### 2"},
    "geo3k": {"images": [IMAGE], "problem": "<image>1 + 1?", "answer": "2"},
    "dianjin": {"instruction": "1 + 1? A. 2 C. 4", "reasoning": "hm", "answer": r"\boxed{C, A}"},
    "jsonl": {"prompt": "1 + 1?", "answer": "2"},
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def order(name: str, source: Path, **changes: Any) -> PrepareJob:
    options = PrepareOptions("train", PUBLISHED_SETS[name].data_source or "mine")
    output = source.parent / "out" / "made.parquet"
    return replace(PrepareJob(name, (source,), output, options), **changes)


def made_rows(made: PrepareJob) -> list[PromptRow]:
    columns = PromptColumns(images="images")
    files = open_prompt_files([str(made.output)], columns, config_key="made")
    chunks = [chunk for block in files.blocks for chunk in ChunkReader().read(block)]
    return [chunk.decode(i, columns) for chunk in chunks for i in range(len(chunk))]


@pytest.mark.parametrize("name", ORIGINALS)
def test_every_published_set_becomes_a_file_the_loop_reads(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "original.parquet", [ORIGINALS[name]])
    made = order(name, source)
    assert prepare(made) == PrepareResult(num_read=1, num_written=1)
    (row,) = made_rows(made)
    assert "1 + 1?" in row.messages[0].content
    assert row.messages[0].role == "user"
    assert row.ground_truth == ("AC" if name == "dianjin" else "2")
    assert row.data_source == (PUBLISHED_SETS[name].data_source or "mine")
    assert set(ORIGINALS) == set(PUBLISHED_SETS)


def test_each_set_with_a_built_in_scorer_has_the_source_that_leads_to_it() -> None:
    names = {one.data_source: scorer_name(one.data_source) for one in PUBLISHED_SETS.values()}
    assert names == {
        "math_dapo": "math_dapo",
        "aime_2024": "math_dapo",
        "HuggingFaceH4/MATH-500": "math_boxed",
        "openai/gsm8k": "gsm8k",
        "hiyouga/geometry3k": "geo3k",
        "dianjin": None,
        "": None,
    }


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("dapo-math-17k", "Solve. 1 + 1?"),
        (
            "gsm8k",
            '1 + 1? Let\'s think step by step and output the final answer after "####".',
        ),
        (
            "math-500",
            r"1 + 1? Let's think step by step and output the final answer within \boxed{}.",
        ),
    ],
)
def test_what_is_asked_is_what_verl_asks(tmp_path: Path, name: str, prompt: str) -> None:
    made = order(name, write(tmp_path / "a.parquet", [ORIGINALS[name]]))
    prepare(made)
    assert made_rows(made)[0].messages[0].content == prompt


def test_rows_in_verls_format_keep_what_else_they_say(tmp_path: Path) -> None:
    made = order("dapo-math-17k", write(tmp_path / "a.parquet", [DAPO_ROW]))
    prepare(made)
    assert made_rows(made)[0].extra_info == {"split": "train", "index": "9a9b6eb4"}


@pytest.mark.parametrize(
    ("answer", "truth"), [("a\n#### 1,234", "1234"), ("#### -3", "-3"), ("#### $5 ", "5")]
)
def test_gsm8k_numbers_lose_commas_and_signs_of_money(
    tmp_path: Path, answer: str, truth: str
) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": "q", "answer": answer}])
    made = order("gsm8k", source)
    prepare(made)
    assert made_rows(made)[0].ground_truth == truth


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("none", None),
    ],
)
def test_the_last_box_is_found_by_its_braces(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_images_travel_with_their_marks(tmp_path: Path) -> None:
    row = ORIGINALS["geo3k"] | {"images": [IMAGE, IMAGE], "problem": "which?"}
    made = order("geo3k", write(tmp_path / "a.parquet", [row]))
    prepare(made)
    (found,) = made_rows(made)
    assert found.images == (b"png", b"png")
    assert found.messages[0].content.startswith("<image><image>which?")


@pytest.mark.parametrize("image", [{"bytes": "cG5n"}, "data:image/png;base64,cG5n"])
def test_base64_of_json_lines_becomes_the_bytes_of_the_image(tmp_path: Path, image: object) -> None:
    row = ORIGINALS["geo3k"] | {"images": [image]}
    made = order("geo3k", write(tmp_path / "a.jsonl", [row]))
    prepare(made)
    (found,) = made_rows(made)
    assert found.images == (b"png",)


def test_paths_of_images_lead_to_the_same_files_from_the_folder_written_to(tmp_path: Path) -> None:
    given = ["pics/a.png", str(tmp_path / "b.png"), {"bytes": None, "path": "c.png"}]
    row = ORIGINALS["geo3k"] | {"images": given, "problem": "which?"}
    made = order("geo3k", write(tmp_path / "a.jsonl", [row]))
    prepare(made)
    (found,) = made_rows(made)
    places = [(made.output.parent / str(image)).resolve() for image in found.images]
    assert places == [tmp_path / "pics/a.png", tmp_path / "b.png", tmp_path / "c.png"]


@pytest.mark.parametrize("agent", ["single_turn_agent", "Game"])
@pytest.mark.parametrize("name", ["dapo-math-17k", "jsonl"])
def test_a_row_keeps_what_plays_it(tmp_path: Path, name: str, agent: str) -> None:
    rows = [ORIGINALS[name] | {"agent_name": agent}, ORIGINALS[name] | {"agent_name": None}]
    made = order(name, write(tmp_path / "a.parquet", rows))
    prepare(made)
    chosen, free = made_rows(made)
    assert chosen.extra_info["agent_name"] == agent
    assert "agent_name" not in free.extra_info


def test_what_plays_a_row_may_be_named_after_many_rows_without_it(tmp_path: Path) -> None:
    rows = [ORIGINALS["jsonl"] | {"agent_name": None}] * 1400
    rows += [ORIGINALS["jsonl"] | {"agent_name": "Game"}]
    made = order("jsonl", write(tmp_path / "a.parquet", rows))
    assert prepare(made).num_written == 1401
    assert made_rows(made)[-1].extra_info["agent_name"] == "Game"


@pytest.mark.parametrize("column", ["videos", "audios"])
def test_rows_with_other_media_are_refused(tmp_path: Path, column: str) -> None:
    file = write(tmp_path / "a.jsonl", [ORIGINALS["dapo-math-17k"] | {column: ["a.mp4"]}])
    with pytest.raises(DataError, match=f"row 0 holds {column}, and no run reads them"):
        prepare(order("dapo-math-17k", file))


@pytest.mark.parametrize("lost", ["tool_calls", "reasoning_content"])
def test_a_message_with_more_than_role_and_content_is_a_bad_row(tmp_path: Path, lost: str) -> None:
    turn = {"role": "assistant", "content": "x", lost: "y"}
    source = write(tmp_path / "a.jsonl", [DAPO_ROW, DAPO_ROW | {"prompt": [turn]}])
    with pytest.raises(DataError, match=rf"row 1: 'prompt' holds a message with {lost}"):
        prepare(order("dapo-math-17k", source))


def test_copies_are_left_out_on_request_and_the_limit_counts_what_is_written(
    tmp_path: Path,
) -> None:
    rows = [{"question": f"q{i % 5}", "answer": "#### 1"} for i in range(100)]
    source = write(tmp_path / "a.jsonl", rows)
    made = order("gsm8k", source, deduplicate=True)
    assert prepare(made) == PrepareResult(num_read=100, num_written=5, num_duplicates=95)
    assert [row.extra_info["index"] for row in made_rows(made)] == [0, 1, 2, 3, 4]
    limited = order("gsm8k", source, deduplicate=True, limit=3)
    assert prepare(limited).num_written == 3
    assert len(made_rows(limited)) == 3


def test_row_groups_are_small_enough_to_shuffle(tmp_path: Path) -> None:
    count = 2 * ROWS_PER_GROUP + 1
    rows = [{"question": f"q{i}", "answer": "#### 1"} for i in range(count)]
    made = order("gsm8k", write(tmp_path / "a.jsonl", rows))
    prepare(made)
    metadata = pq.read_metadata(made.output)
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sizes == [ROWS_PER_GROUP, ROWS_PER_GROUP, 1]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "2"}, "no number after ####"),
        ("gsm8k", {"question": None, "answer": "#### 2"}, "'question' is None, not a text"),
        ("math-500", {"problem": "p", "solution": "none"}, r"nor a \\boxed{} in 'solution'"),
        ("dianjin", {"instruction": "q", "answer": "unsure"}, "no letters A to G"),
        ("geo3k", {"problem": "p", "answer": "1", "images": []}, r"'images' is \[\]"),
        ("jsonl", {"prompt": "q", "answer": None}, "'answer': the answer is None"),
        (
            "jsonl",
            {"question": "q", "answer": "1"},
            r"no field 'prompt' \(found: question, answer\); name yours with --prompt-field",
        ),
        ("jsonl", {"prompt": "q", "truth": "1"}, "no field 'answer'.*--answer-field"),
        ("dapo-math-17k", DAPO_ROW | {"prompt": "text"}, "not a list of messages"),
    ],
)
def test_a_row_that_cannot_be_used_ends_it_by_name_and_leaves_no_file(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    good = ORIGINALS[name] | {"images": ["a.png"]} if name == "geo3k" else ORIGINALS[name]
    source = write(tmp_path / "a.jsonl", [good, row])
    made = order(name, source)
    with pytest.raises(DataError, match=message) as error:
        prepare(made)
    assert f"{source}, row 1: " in str(error.value)
    assert list(made.output.parent.iterdir()) == []
    found = prepare(order(name, source, skip_bad=True))
    assert (found.num_written, found.num_bad, len(found.problems)) == (1, 1, 1)


@pytest.mark.parametrize("depth", [900, 960, 100_000])
def test_a_deeply_nested_line_is_a_bad_row(tmp_path: Path, depth: int) -> None:
    deep = json.dumps(DAPO_ROW | {"prompt": "DEEP"}).replace('"DEEP"', "[" * depth + "]" * depth)
    source = tmp_path / "a.jsonl"
    source.write_text(f"{json.dumps(DAPO_ROW)}\n{deep}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: "):
        prepare(order("dapo-math-17k", source))
    found = prepare(order("dapo-math-17k", source, skip_bad=True))
    assert (found.num_written, found.num_bad) == (1, 1)


def test_a_file_of_another_set_is_refused_with_the_columns(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [ORIGINALS["gsm8k"]])
    with pytest.raises(DataError, match=r"question, answer are not those of geo3k \(images, "):
        prepare(order("geo3k", source))


def test_fields_that_only_later_rows_have_are_not_lost_silently(tmp_path: Path) -> None:
    rows = prompt_rows([f"{i}" for i in range(ROWS_PER_GROUP + 1)])
    rows[-1]["extra_info"] = {"index": 0, "split": "train", "hint": "new"}
    source = write(tmp_path / "a.jsonl", rows)
    made = order("jsonl", source)
    with pytest.raises(DataError, match=rf"row {ROWS_PER_GROUP}: field hint is in none of"):
        prepare(made)
    assert list(made.output.parent.iterdir()) == []


@pytest.mark.parametrize("more", [{"agent_name": "Game"}, {"extra_info": {"hint": "new"}}])
def test_a_field_of_a_late_row_is_read_once_the_row_is_where_the_message_wants_it(
    tmp_path: Path, more: dict[str, object]
) -> None:
    rows = [{**row, "extra_info": {}} for row in prompt_rows(["1"] * (ROWS_PER_GROUP + 1))]
    rows[-1] |= more
    made = order("jsonl", write(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=rf"row {ROWS_PER_GROUP}: .*; move this row to the top of"):
        prepare(made)
    write(tmp_path / "a.jsonl", [rows[-1], *rows[:-1]])
    assert prepare(made).num_written == len(rows)


def test_a_field_whose_type_changes_is_refused(tmp_path: Path) -> None:
    rows = prompt_rows(["a", "b"])
    rows[1]["extra_info"] = {"index": "x", "split": "train"}
    with pytest.raises(DataError, match="give each field one type"):
        prepare(order("jsonl", write(tmp_path / "a.jsonl", rows)))


@pytest.mark.parametrize("index", [0, ROWS_PER_GROUP])
def test_a_number_outside_64_bits_is_refused_with_its_place(tmp_path: Path, index: int) -> None:
    rows = prompt_rows([f"{i}" for i in range(ROWS_PER_GROUP + 1)])
    rows[index]["extra_info"] = {"index": 2**80, "split": "train"}
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=rf"a\.jsonl, row {index} and .*within 64 bits"):
        prepare(order("jsonl", source))
