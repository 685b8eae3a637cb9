"""`sluice eval compare` and `sluice eval regrade`, and `sluice eval` beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.run.evaluation import EvaluationOrder, evaluation_config
from sluice.cli.run.evaluation_origin import claim_folder
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError, SluiceError
from sluice.evaluation.results import RESULTS_NAME, read_results
from sluice.evaluation.stored_responses import read_responses
from sluice.service_contract import CONFIG_NAME
from tests.support.stored_evaluation import evaluation, graded, prompt, sample, store


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["eval", *arguments], terminal_width=80)
    if isinstance(result.exception, SluiceError):
        return 1, str(result.exception)
    return result.exit_code, result.output


def test_help_lists_the_commands_below() -> None:
    text = invoke("--help")[1]
    assert "\n  compare  Compare evaluations" in text
    assert "\n  regrade  Grade the stored responses" in text


def test_a_run_whose_folder_has_a_commands_name_can_be_named(tmp_path: Path) -> None:
    code, text = invoke("--run", "compare")
    assert code == 1
    assert "run: compare does not exist" in text


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


def test_a_folder_of_evaluations_stands_for_all_of_them_in_the_order_of_their_steps(
    tmp_path: Path,
) -> None:
    for step in (12, 4):
        evaluation(tmp_path / f"global_step_{step}", [graded(0, 1.0)])
    (tmp_path / "report.html").touch()
    code, text = invoke("compare", str(tmp_path), "--json")
    assert code == 0, text
    found = json.loads(text)["evaluations"]
    assert [one["label"] for one in found] == ["global_step_4", "global_step_12"]
    code, text = invoke("compare", *map(str, sorted(tmp_path.iterdir())))
    assert (code, f"report.html: is a file; give {tmp_path} for all" in text) == (1, True)


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    folder, page = evaluation(tmp_path / "a", [graded(0, 1.0)]), tmp_path / "new" / "page.html"
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


@pytest.fixture
def order(tmp_path: Path) -> EvaluationOrder:
    """An evaluation whose scorer is ``grade.py``, claimed and stored, without results."""
    (tmp_path / "rows.jsonl").touch()
    grade = tmp_path / "grade.py"
    grade.write_text("def compute_score(**_):\n    raise ValueError\n")
    keys = [f"reward.custom_reward_function.path={grade}", "reward.num_workers=1"]
    rows = {"math": tmp_path / "rows.jsonl"}
    order = EvaluationOrder(tmp_path / "model", rows, tmp_path / "out", overrides=keys)
    config = evaluation_config(order)
    claim_folder(order.output, config)
    write_config(config, order.output / CONFIG_NAME)
    failed = sample(acc=None, failure="unscorable: ValueError")
    store(order.output, [prompt(0, [failed])])
    return order


def test_an_evaluation_whose_scorer_failed_continues_once_it_is_graded_again(
    order: EvaluationOrder,
) -> None:
    (order.output.parent / "grade.py").write_text("def compute_score(**_):\n    return 0.25\n")
    with pytest.raises(ConfigError, match=r"grade\.py was written again"):
        claim_folder(order.output, evaluation_config(order))
    code, text = invoke("regrade", str(order.output))
    assert code == 0, text
    assert "the evaluation's command, with these keys, finishes it" in text
    assert not (order.output / RESULTS_NAME).exists()
    claim_folder(order.output, evaluation_config(order))
    ((_, stored),) = read_responses(order.output / "responses" / "math.jsonl")
    assert stored.samples[0].reward == 0.25


def test_after_grading_with_another_scorer_only_that_one_continues(order: EvaluationOrder) -> None:
    other = order.output.parent / "other.py"
    other.write_text("def compute_score(**_):\n    return 0.5\n")
    key = f"reward.custom_reward_function.path={other}"
    assert invoke("regrade", str(order.output), key)[0] == 0
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path = '.*other\.py' is now"):
        claim_folder(order.output, evaluation_config(order))
    claim_folder(order.output, evaluation_config(replace(order, overrides=[*order.overrides, key])))
    assert invoke("regrade", str(order.output))[0] == 0
    claim_folder(order.output, evaluation_config(order))


def test_what_decided_the_samples_cannot_be_another_when_they_are_graded_again(
    order: EvaluationOrder,
) -> None:
    code, text = invoke("regrade", str(order.output), "data.max_response_length=7")
    assert code == 1
    assert "data.max_response_length = 7: the responses were sampled with another value" in text


def test_responses_of_an_active_evaluation_are_not_graded_again(
    order: EvaluationOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(_: Path) -> tuple[()]:
        return ()

    monkeypatch.setattr("sluice.cli.run.checked.launched_processes", answers)
    code, text = invoke("regrade", str(order.output))
    assert code == 1
    assert "active in this folder" in text
