"""`sluice reward try`: which responses are graded, what is shown, exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli import reward as module
from sluice.cli.main import commands
from sluice.config.run import RunConfig
from sluice.config.schema.reward import RewardConfig
from sluice.data.prompt_rows import PromptRow
from sluice.doctor.trial import TrialAnswer
from sluice.errors import ConfigError, DataError
from tests.support.prompt_parquet import prompt_rows, write_prompts


class ScriptedScorer:
    """Grades a response by whether it contains the ground truth; notes what it got."""

    def __init__(self) -> None:
        self.reward = RewardConfig()
        self.pairs: list[tuple[PromptRow, str]] = []
        self.failing: set[int] = set()
        self.printed = ""

    def __call__(
        self, config: RunConfig, pairs: Sequence[tuple[PromptRow, str]], enough_s: float
    ) -> tuple[list[TrialAnswer], str]:
        reward = config.reward
        assert enough_s >= len(pairs) * reward.scorer_pool.timeout_s
        self.reward, self.pairs = reward, list(pairs)
        return [self._answer(*one) for one in enumerate(pairs)], self.printed

    def _answer(self, number: int, pair: tuple[PromptRow, str]) -> TrialAnswer:
        if number in self.failing:
            return TrialAnswer(
                failure="unscorable: it raised", frames=("mine.py:3 in grade: x[0]",)
            )
        right = float(pair[0].ground_truth in pair[1])
        return TrialAnswer(right, {"acc": right}, "pred")


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> ScriptedScorer:
    scripted = ScriptedScorer()
    monkeypatch.setattr(module, "try_responses", scripted)
    return scripted


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = prompt_rows([f"question {number}" for number in range(5)])
    return write_prompts(tmp_path / "train.parquet", rows)


def sluice_try(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["reward", "try", *map(str, arguments)])


def given(tmp_path: Path, *lines: object) -> Path:
    file = tmp_path / "responses.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_first_rows_get_a_made_up_response_that_ends_with_the_ground_truth(
    scorer: ScriptedScorer, data: Path
) -> None:
    result = sluice_try("mine.py", "--data", data, "-n", 3)
    assert result.exit_code == 0, result.output
    assert scorer.reward.custom_reward_function.path == "mine.py"
    assert len(scorer.pairs) == 3
    assert all(f"#### {row.ground_truth}\n" in response for row, response in scorer.pairs)
    assert f"[2] {data}, row 2: score 1 acc=1 pred='pred'\n" in result.output
    assert "3 of 3 scored, mean 1, 1 to 1\n" in result.output


def test_with_truth_the_response_is_the_ground_truth_alone(
    scorer: ScriptedScorer, data: Path
) -> None:
    assert sluice_try("mine.py", "--data", data, "--with-truth").exit_code == 0
    assert [response for _, response in scorer.pairs] == [
        row.ground_truth for row, _ in scorer.pairs
    ]


def test_a_response_of_a_file_takes_what_it_lacks_from_the_row_of_its_number(
    scorer: ScriptedScorer, data: Path, tmp_path: Path
) -> None:
    own = {"response": "b", "data_source": "mine", "ground_truth": "7", "extra_info": {"a": 1}}
    file = given(tmp_path, {"response": "a"}, own)
    assert sluice_try("mine.py", "--data", data, "--responses", file).exit_code == 0
    (first, a), (second, b) = scorer.pairs
    assert (a, first.data_source, b) == ("a", "math_dapo", "b")
    assert (second.data_source, second.ground_truth, second.extra_info) == ("mine", "7", {"a": 1})


def test_responses_with_their_own_rows_need_no_data(scorer: ScriptedScorer, tmp_path: Path) -> None:
    file = given(tmp_path, {"response": "7", "data_source": "mine", "ground_truth": "7"})
    assert sluice_try("mine.py", "--responses", file).exit_code == 0
    assert len(scorer.pairs) == 1


def test_a_response_without_a_row_is_an_error_that_names_its_line(
    scorer: ScriptedScorer, tmp_path: Path
) -> None:
    result = sluice_try("mine.py", "--responses", given(tmp_path, {"response": "7"}))
    assert isinstance(result.exception, DataError)
    assert "responses.jsonl, line 1: no data_source or ground_truth" in str(result.exception)
    assert not scorer.pairs


def test_a_response_without_a_score_ends_with_1_and_shows_the_authors_frames(
    scorer: ScriptedScorer, data: Path
) -> None:
    scorer.failing, scorer.printed = {1}, "printed \x1b[31m"
    result = sluice_try("mine.py", "--data", data, "-n", 2)
    assert result.exit_code == 1
    assert "row 1: failed: unscorable: it raised" in result.output
    assert "\n    mine.py:3 in grade: x[0]\n" in result.output
    assert "1 of 2 scored" in result.output
    assert "printed \\x1b[31m" in result.output


def test_json_has_an_object_for_each_response(scorer: ScriptedScorer, data: Path) -> None:
    scorer.failing = {1}
    result = sluice_try("mine.py", "--data", data, "-n", 2, "--json")
    good, bad = (json.loads(line) for line in result.stdout.splitlines())
    assert (good["score"], good["metrics"], good["row"]) == (1.0, {"acc": 1.0}, f"{data}, row 0")
    assert (bad["score"], bad["failure"]) == (None, "unscorable: it raised")
    assert bad["frames"] == ["mine.py:3 in grade: x[0]"]


def test_function_and_data_may_have_any_name(scorer: ScriptedScorer, tmp_path: Path) -> None:
    rows, function = tmp_path / r"a\,b [1]", r"it\,s/mine.py"
    rows.mkdir()
    data = write_prompts(rows / "train.parquet", prompt_rows(["1 + 1"]))
    assert sluice_try(function, "--data", data).exit_code == 0
    assert scorer.reward.custom_reward_function.path == function


def test_a_runs_file_names_function_data_and_limits(
    scorer: ScriptedScorer, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        f"data: {{train_files: {data}}}\n"
        "reward: {custom_reward_function: {path: mine.py, name: grade}}\n"
    )
    assert sluice_try(run, "reward.scorer_pool.timeout_s=3", "-n", 1).exit_code == 0
    function = scorer.reward.custom_reward_function
    assert (function.path, function.name) == ("mine.py", "grade")
    assert scorer.reward.scorer_pool.timeout_s == 3


def test_the_sources_of_a_run_give_rows_in_turns(
    scorer: ScriptedScorer, data: Path, tmp_path: Path
) -> None:
    other = write_prompts(tmp_path / "other.parquet", prompt_rows(["one question"]))
    run = tmp_path / "run.yaml"
    sources = {"a": {"files": str(data), "share": 1}, "b": {"files": str(other), "share": 1}}
    run.write_text(json.dumps({"sluice": {"sources": sources}, "data": {"val_files": str(data)}}))
    assert sluice_try(run, "-n", 3).exit_code == 0
    assert [row.place for row, _ in scorer.pairs] == [
        f"{data}, row 0",
        f"{other}, row 0",
        f"{data}, row 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py"], "data.train_files is null: there is no row to try; give --data FILE"),
        (
            ["mine.py", "sluice.sources.a.files=[]", "sluice.sources.a.share=1"],
            "sluice.sources.a.files is null",
        ),
        (["mine.py", "--with-truth", "--responses", "a.jsonl"], "leave one out"),
    ],
)
def test_nothing_to_grade_and_two_kinds_of_responses_are_refused(
    scorer: ScriptedScorer, arguments: list[str], message: str
) -> None:
    result = sluice_try(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not scorer.pairs


def test_a_response_of_a_file_keeps_the_value_that_its_row_has_as_ground_truth(
    scorer: ScriptedScorer, tmp_path: Path
) -> None:
    (row,) = prompt_rows(["?"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**row, "reward_model": {"ground_truth": ["a"]}}) + "\n")
    for own, expected in (({}, True), ({"ground_truth": "a"}, False)):
        file = given(tmp_path, {"response": "a", **own})
        sluice_try("mine.py", "--data", rows, "--responses", file)
        assert scorer.pairs[-1][0].truth_is_json is expected


def test_as_many_rows_are_graded_as_asked_for_whatever_blocks_and_files_they_lie_in(
    tmp_path: Path, scorer: ScriptedScorer
) -> None:
    rows = prompt_rows([f"question {number}" for number in range(12)])
    first = write_prompts(tmp_path / "a.parquet", rows[:5], row_group_size=2)
    second = write_prompts(tmp_path / "b.parquet", rows[5:], row_group_size=2)
    files = f"data.train_files=[{first},{second}]"
    assert sluice_try("mine.py", files, "-n", 9).exit_code == 0
    assert [row.ground_truth for row, _ in scorer.pairs] == [str(number) for number in range(9)]
