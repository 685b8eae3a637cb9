"""The programs of recipes do what their READMEs say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from services.reward.grading.scorers.registry import RULES
from sluice.cli.main import commands
from tests.support.documents import blocks
from tests.support.small_run import make_assets
from tests.support.source_tree import ROOT

RECIPES = ROOT / "recipes"
CALCULATOR = RECIPES / "calculator-tools"


def run_program(program: str, *arguments: object) -> str:
    command = [sys.executable, RECIPES / program, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rows_of(file: Path) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def test_the_run_of_the_calculator_has_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_program("calculator-tools/problems.py", "data")
    model = make_assets(tmp_path).folder / "model"
    # Its tokenizer has hardly more than bytes, and its context 512 tokens.
    small = [f"actor_rollout_ref.model.path={model}", "data.max_response_length=128"]
    small += [f"sluice.environment.path={CALCULATOR / 'calculator.py'}"]
    run = str(CALCULATOR / "run.yaml")
    result = CliRunner().invoke(commands, ["config", "check", run, *small])
    assert result.exit_code == 0, result.output
    assert "No problems found" in result.output


def test_the_calculator_plays_the_episode_of_its_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = blocks(CALCULATOR / "README.md", "console")[0].splitlines()
    assert "$ python recipes/calculator-tools/problems.py data" in shown
    file, call = "recipes/calculator-tools/calculator.py", 'calc {"expression": "47 * 38 + 125"}'
    assert f"$ sluice env check {file} --call '{call}' --answer 1911 --truth 1911" in shown
    arguments = [file, "--call", call, "--answer", "1911", "--truth", "1911"]
    result = CliRunner().invoke(commands, ["env", "check", *arguments])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-4:] == [
        "tool: 1911",
        "assistant: 1911",
        "the episode is over",
        "score 1",
    ]


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"<think>\boxed{A}</think><answer>\boxed{B}</answer>", "B", 1.0),
        (r"\boxed{D, A}", "AD", 1.0),
        (r"\boxed{A}", "AD", 0.0),
        ("A", "A", 0.0),
        (r"\boxed{}", "", 0.0),
        (r"\boxed{B", "B", 0.0),
    ],
)
def test_the_reward_of_choices_compares_the_letters_of_the_last_box(
    answer: str, truth: str, score: float
) -> None:
    reward = runpy.run_path(str(RECIPES / "dianjin-qwen3-8b-npu" / "reward.py"))
    assert reward["compute_score"]("cflue_mcq", answer, truth) == score


def test_published_choices_become_rows_with_a_held_out_part(tmp_path: Path) -> None:
    items = [
        {"instruction": f"Which? {n}", "output": rf"<think>{n}</think><answer>\boxed{{B}}</answer>"}
        for n in range(100)
    ]
    items += [items[7], {"instruction": "None?", "output": "<answer>unsure</answer>"}]
    items += [{"instruction": "Both?", "output": r"<answer>\boxed{AB}</answer>\boxed{C}"}]
    published = tmp_path / "cflue_mcq.json"
    published.write_text(json.dumps(items), encoding="utf-8")
    said = run_program("dianjin-qwen3-8b-npu/prepare.py", published, tmp_path / "data")
    assert said.splitlines() == ["train: 99", "test: 2", "repeated: 1", "without letters: 1"]
    train, test = (
        rows_of(tmp_path / "data" / f"cflue-{name}.parquet") for name in ("train", "test")
    )
    assert train[-1]["reward_model"]["ground_truth"] == "AB"
    asked = [row["prompt"][0]["content"] for row in (*train, *test)]
    assert len(set(asked)) == 101
    assert {row["data_source"] for row in train} == {"cflue_mcq"}


def test_the_made_questions_of_choices_have_the_truth_of_an_answer_without_slips() -> None:
    folder = RECIPES / "dianjin-qwen3-8b-npu"
    made = runpy.run_path(str(folder / "tiny.py"))
    score = runpy.run_path(str(folder / "reward.py"))["compute_score"]
    for _, gains in islice(made["questions"]("0"), 50):
        truth = "".join(letter for letter, gain in gains.items() if gain > 0)
        answer, wrong = (made["answer_to"](gains, Random(0), rate) for rate in (0.0, 1.0))
        assert score("cflue_mcq", answer, truth) == 1.0
        assert score("cflue_mcq", wrong, truth) == 0.0


def test_the_made_triangles_are_scored_by_answer_and_form() -> None:
    made = runpy.run_path(str(RECIPES / "dapo-qwen3-vl-30b-npu" / "tiny.py"))
    score = RULES["geo3k"]
    for _, problem, answer in islice(made["problems"]("0"), 20):
        assert score(made["solution"](problem, answer), str(answer)) == 1.0
        assert score(made["solution"](problem, answer + 1), str(answer)) == pytest.approx(0.1)


def test_the_made_programs_pass_their_tests_and_slips_do_not(tmp_path: Path) -> None:
    made = runpy.run_path(str(RECIPES / "sandboxed-code" / "tiny.py"))
    asked = list(range(len(made["OPERATIONS"])))
    for operations, passes in ((asked, True), ([*asked[1:], asked[0]], False)):
        text = made["program"](operations).removeprefix("```python\n").removesuffix("```")
        (tmp_path / "solution.py").write_text(text, encoding="utf-8")
        cases = json.loads(made["tests"](asked))
        outputs = [
            subprocess.run(
                [sys.executable, tmp_path / "solution.py"],
                input=given,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for given in cases["inputs"]
        ]
        assert [one == other for one, other in zip(outputs, cases["outputs"], strict=True)] == [
            passes
        ] * len(outputs)


def test_programming_problems_with_tests_are_picked_out_of_a_published_file(tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    truths = [("taco", tests), ("numina_olympiads", "5"), ("apps", "5"), ("apps", tests)]
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Solve {number}."}],
            "ability": "code",
            "reward_model": {"ground_truth": truth, "style": "rule"},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, (source, truth) in enumerate(truths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "published.parquet")
    output = tmp_path / "data" / "code-train.parquet"
    said = run_program("sandboxed-code/prepare.py", output, tmp_path / "published.parquet")
    assert said == f"{output}: 2 problems; 1 without tests left out\n"
    assert rows_of(output) == [rows[0], rows[3]]
