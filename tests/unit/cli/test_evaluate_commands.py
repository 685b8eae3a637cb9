"""`sluice eval compare` and `sluice eval regrade`, and `sluice eval` beside them."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.errors import SluiceError
from sluice.evaluation.results import read_results
from sluice.service_contract import CONFIG_NAME
from tests.support.stored_evaluation import evaluation, graded, prompt, sample, store


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["eval", *arguments], terminal_width=80)
    if isinstance(result.exception, SluiceError):
        return 1, str(result.exception)
    return result.exit_code, result.output


def test_help_lists_the_commands_below_and_each_shows_an_example() -> None:
    text = invoke("--help")[1]
    assert "\n  compare  Compare evaluations" in text
    assert "\n  regrade  Grade the stored responses" in text
    for name in ("compare", "regrade"):
        code, text = invoke(name, "--help")
        assert code == 0
        assert f"sluice eval {name} " in text.partition("Example")[2]
        assert "--json" in text


def test_a_run_whose_folder_has_a_commands_name_can_be_named(tmp_path: Path) -> None:
    code, text = invoke("--run", "compare")
    assert code == 1
    assert "compare holds no config.yaml" in text


def test_means_and_differences_are_printed_with_their_errors(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "base", [graded(0, 0.0), graded(1, 1.0)])
    second = evaluation(tmp_path / "trained", [graded(0, 1.0), graded(1, 1.0)])
    code, text = invoke("compare", str(first), str(second))
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert ["base", "0.500", "±", "0.500", "-", "0.500", "±", "0.500", "2", "0"] in rows
    assert "+0.500 ± 0.500" in text


def test_an_evaluation_that_runs_is_marked(tmp_path: Path) -> None:
    store(tmp_path / "a", [graded(0, 1.0)])
    assert "a (has not ended)" in invoke("compare", str(tmp_path / "a"))[1]


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    folder, page = evaluation(tmp_path / "a", [graded(0, 1.0)]), tmp_path / "page.html"
    code, text = invoke("compare", str(folder), "--output", str(page), "--json")
    assert code == 0
    assert json.loads(text)["page"] == str(page)
    assert json.loads(text)["benchmarks"]["math"]["results"][0]["mean"]["value"] == 1.0
    assert page.read_text().startswith("<!doctype html>")


def test_regrading_writes_results_and_page_and_keeps_the_former_ones(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", [prompt(0, [sample(acc=1.0)])])
    function = tmp_path / "grade.py"
    function.write_text("def compute_score(*, solution_str, **_):\n    return 0.25\n")
    (folder / CONFIG_NAME).write_text("reward: {num_workers: 1}\n")
    setting = f"reward.custom_reward_function.path={function}"
    code, text = invoke("regrade", str(folder), setting)
    assert code == 0, text
    assert "math: mean acc 0.250, before 1.000" in text
    results = read_results(folder)
    assert results.benchmarks["math"].metrics["val-core/math/acc/mean@1"] == 0.25
    assert (results.model, results.sampling, results.seconds) == ("models/a", {"top_p": 0.7}, 1.5)
    former = json.loads((folder / "results-1.json").read_text())
    assert former["benchmarks"]["math"]["mean"]["value"] == 1.0
    assert "before: reward 1" in (folder / "report.html").read_text()


def test_an_evaluation_that_has_not_ended_is_not_graded_again(tmp_path: Path) -> None:
    store(tmp_path, [graded(0, 1.0)])
    (tmp_path / CONFIG_NAME).write_text("")
    code, text = invoke("regrade", str(tmp_path))
    assert code == 1
    assert "give the --output folder of an evaluation that ended" in text
