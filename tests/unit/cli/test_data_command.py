"""`sluice data`: files converted, findings shown, exit codes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.data import SetName, data_commands
from sluice.data.inspection import quantiles
from sluice.data.prepare import PUBLISHED_SETS
from sluice.errors import ConfigError, DataError
from sluice.quickstart.arithmetic import TASKS, draw_problem, make_dialogues
from sluice.quickstart.tokenizer import save_tokenizer, train_tokenizer
from tests.support.image_files import png
from tests.support.prompt_parquet import prompt_rows, write_prompts


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(data_commands, [str(one) for one in arguments], terminal_width=100)


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    rows = [
        *prompt_rows(["a" * 10, "b" * 20, "c" * 30]),
        *prompt_rows(["verse"], data_source="poetry"),
    ]
    return write_prompts(tmp_path / "train.parquet", [*rows, rows[0]])


def test_inspect_shows_sources_with_scorers_lengths_and_copies(rows_file: Path) -> None:
    result = invoke("inspect", rows_file)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["math_dapo", "4", "math_dapo"] in lines
    assert ["poetry", "1", "none"] in lines
    assert ["duplicates", "1", "(20.0%)"] in lines
    assert ["characters", "5", "10", "10", "20", "30", "30", "30"] in lines
    assert "data_source, prompt, ability, reward_model, extra_info" in result.output
    assert "no built-in scorer for poetry; name one with reward.scorer_routes" in result.output


def test_inspect_looks_into_images(tmp_path: Path) -> None:
    rows = prompt_rows(["<image>", "<image>", "<image>"])
    for row, image in zip(rows, (png(), png(claims=(60_000, 60_000)), b"GIF89a"), strict=True):
        row["images"] = [{"bytes": image, "path": None}]
    result = invoke("inspect", write_prompts(tmp_path / "a.parquet", rows))
    assert result.exit_code == 1
    lines = [line.split() for line in result.output.splitlines()]
    assert ["images", "1"] in lines
    assert "a.parquet, row 1: images[0]: 60000 x 60000 pixels" in result.output
    assert "a.parquet, row 2: images[0]: 6 bytes that begin with b'GIF89a'" in result.output


def test_inspect_as_json_says_the_same(rows_file: Path) -> None:
    found = json.loads(invoke("inspect", rows_file, "--json").output)
    assert found["num_rows"] == 5
    assert found["num_duplicates"] == 1
    assert found["data_sources"]["poetry"] == {"rows": 1, "scorer": None, "unread_truths": 0}
    assert found["characters"]["most"] == 30
    assert found["tokens"] == {}


@pytest.mark.parametrize("named", [("a.parquet", "b.jsonl"), ("[ab].*",), ("b.jsonl", "a.*")])
def test_files_are_inspected_together_as_a_run_reads_them(
    tmp_path: Path, named: tuple[str, ...]
) -> None:
    rows = prompt_rows(["a" * 10, "b" * 20])
    write_prompts(tmp_path / "a.parquet", rows)
    other = {**rows[0], "level": 3}
    (tmp_path / "b.jsonl").write_text(json.dumps(other) + "\n{broken\n", encoding="utf-8")
    result = invoke("inspect", *(tmp_path / name for name in named), "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1, result.output
    assert sorted(found["files"]) == [str(tmp_path / name) for name in ("a.parquet", "b.jsonl")]
    assert (found["num_rows"], found["num_bad"], found["num_duplicates"]) == (4, 1, 1)
    assert set(found["columns"]) == set(other)
    assert f"{tmp_path / 'b.jsonl'}, row 1: no JSON object" in found["problems"][0]
    shown = invoke("inspect", tmp_path / "a.parquet", tmp_path / "b.jsonl").output
    assert f"{tmp_path / 'a.parquet'}, {tmp_path / 'b.jsonl'}\n" in shown


def test_unusable_rows_are_listed_by_number_and_make_the_exit_code_1(tmp_path: Path) -> None:
    rows = prompt_rows([f"{i}" for i in range(30)])
    for row in rows[3:]:
        row["prompt"] = []
    path = write_prompts(tmp_path / "a.parquet", rows)
    result = invoke("inspect", path)
    assert result.exit_code == 1
    assert f"problem: {path}, row 3: 'prompt' holds no message" in result.output
    assert "and 7 more" in result.output


def test_a_broken_line_does_not_hide_the_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps(prompt_rows(["a"])[0])
    path.write_text(f"{good}\n{{broken\n{good}\n", encoding="utf-8")
    result = invoke("inspect", path, "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1
    assert (found["num_bad"], found["num_duplicates"]) == (1, 1)
    assert "row 1: no JSON object" in found["problems"][0]


def test_a_column_that_is_missing_ends_it_with_the_column(rows_file: Path) -> None:
    result = invoke("inspect", rows_file, "--prompt-key", "turns")
    assert isinstance(result.exception, DataError)
    text = str(result.exception)
    assert "no column 'turns' (found: data_source, prompt" in text
    assert "or name yours with --prompt-key; 'sluice data prepare'" in text


def test_ground_truths_that_the_scorer_refuses_are_a_note(tmp_path: Path) -> None:
    nq = prompt_rows(["b", "c"], "searchR1_nq")
    rows = [*prompt_rows(["a"]), *nq, *prompt_rows(["d", "e"], "searchR1_musique")]
    for row, truth in zip(rows, (["0"], ["0"], {"target": "0"}, {"a": 1}, []), strict=True):
        row["reward_model"] = {"ground_truth": truth}
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    result = invoke("inspect", path)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "note: 1 rows of math_dapo have a list or a mapping as ground truth, which its" in text
    assert "rows of searchR1_nq" not in text
    sources = json.loads(invoke("inspect", path, "--json").output)["data_sources"]
    assert {name: found["unread_truths"] for name, found in sources.items()} == {
        "math_dapo": 1,
        "searchR1_nq": 0,
        "searchR1_musique": 2,
    }


def test_head_shows_prompts_without_obeying_what_they_hold(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", prompt_rows(["\x1b[31m[red] a", "b"]))
    text = invoke("inspect", path, "--head", 1).output
    assert r"user: \x1b[31m[red] a" in text
    assert "ground truth: 0" in text
    assert "user: b" not in text


def test_a_tokenizer_measures_prompts_as_the_rollout_does(tmp_path: Path, rows_file: Path) -> None:
    rng, task = random.Random(0), TASKS["quickstart"]
    problems = [draw_problem(rng, task) for _ in range(50)]
    save_tokenizer(train_tokenizer(make_dialogues(problems, rng, 0.1)), tmp_path / "model", 512)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    text = invoke("inspect", rows_file, "--tokenizer", tmp_path / "model").output
    assert "tokens" in text
    found = json.loads(
        invoke("inspect", rows_file, "--tokenizer", tmp_path / "model", "--json").output
    )
    from services.rollout.prompt_encoder import PromptEncoder
    from sluice.types import ChatMessage

    encoder = PromptEncoder(tmp_path / "model")
    assert found["tokens"]["most"] == encoder.encode_chat([ChatMessage("user", "c" * 30)]).size


def test_rows_over_a_limit_of_tokens_are_counted(tmp_path: Path, rows_file: Path) -> None:
    result = invoke("inspect", rows_file, "--max-prompt-length", "3")
    assert "give a model folder with --tokenizer" in str(result.exception)
    rng = random.Random(0)
    problems = [draw_problem(rng, TASKS["quickstart"]) for _ in range(30)]
    save_tokenizer(train_tokenizer(make_dialogues(problems, rng, 0.1)), tmp_path / "model", 512)
    arguments = ("inspect", rows_file, "--tokenizer", tmp_path / "model", "--max-prompt-length")
    longest = json.loads(invoke(*arguments, "9", "--json").output)["tokens"]["most"]
    assert json.loads(invoke(*arguments, str(longest), "--json").output)["num_overlong"] == 0
    assert json.loads(invoke(*arguments, str(longest - 1), "--json").output)["num_overlong"] > 0
    assert f"over {longest} tokens  0" in invoke(*arguments, str(longest)).output


def test_tokens_of_rows_with_images_are_not_counted(tmp_path: Path) -> None:
    rng = random.Random(0)
    problems = [draw_problem(rng, TASKS["quickstart"]) for _ in range(30)]
    save_tokenizer(train_tokenizer(make_dialogues(problems, rng, 0.1)), tmp_path / "model", 512)
    rows = prompt_rows(["<image>" * 9, "b"])
    rows[0]["images"] = [{"bytes": png(), "path": None}] * 9
    rows[1]["images"] = []
    with_text = write_prompts(tmp_path / "a.parquet", rows)
    images = write_prompts(tmp_path / "b.parquet", rows[:1])
    options = ("--tokenizer", tmp_path / "model")
    found = json.loads(invoke("inspect", with_text, *options, "--json").output)["tokens"]
    assert found["most"] == found["least"]
    assert "tokens (rows without images)" in invoke("inspect", with_text, *options).output
    assert json.loads(invoke("inspect", images, *options, "--json").output)["tokens"] == {}


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, rows_file: Path) -> None:
    result = invoke("inspect", rows_file, "--tokenizer", tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert f"--tokenizer: {tmp_path} holds no tokenizer" in str(result.exception)


def test_prepare_writes_a_file_that_inspect_finds_whole(tmp_path: Path) -> None:
    source = tmp_path / "original.jsonl"
    rows = [{"question": f"q{i % 3}", "answer": "#### 1"} for i in range(9)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = invoke(
        *("prepare", "gsm8k", "--input", source, "--output", tmp_path / "data"),
        *("--deduplicate", "--split", "test"),
    )
    output = tmp_path / "data" / "gsm8k-test.parquet"
    assert made.output == f"{output}: 3 rows of 9 read, left out 6 duplicates\n"
    found = json.loads(invoke("inspect", output, "--json").output)
    source = {"rows": 3, "scorer": "gsm8k", "unread_truths": 0}
    assert found["data_sources"] == {"openai/gsm8k": source}
    assert (found["num_bad"], found["num_duplicates"]) == (0, 0)


def test_rows_of_ones_own_take_their_names_from_the_command(tmp_path: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text('{"ask": "q", "right": 4}\n', encoding="utf-8")
    made = invoke(
        *("prepare", "jsonl", "--input", source, "--output", tmp_path),
        *("--prompt-field", "ask", "--answer-field", "right", "--data-source", "math_dapo"),
    )
    assert made.exit_code == 0, made.output
    shown = invoke("inspect", tmp_path / "mine-train.parquet", "--head", 1).output
    assert "user: q" in shown
    assert "ground truth: 4" in shown


def test_every_set_can_be_named() -> None:
    assert set(get_args(SetName)) == set(PUBLISHED_SETS)


def test_quantiles_are_lengths_that_occur() -> None:
    import numpy as np

    assert quantiles(np.asarray([1, 2, 3, 4])) == (1, 1, 2, 3, 4, 4, 4)
