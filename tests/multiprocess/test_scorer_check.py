"""What grades responses is tried in processes of their own before anything expensive starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.data.prompt_rows import PromptRow
from sluice.doctor.reward import (
    BUILT_IN,
    made_up_response,
    metric_findings,
    trial_finding,
    try_responses,
    wrong_response_findings,
)
from sluice.doctor.trial import TrialAnswer
from sluice.errors import ConfigError
from sluice.types import ChatMessage
from tests.support.doctor_findings import only
from tests.support.reward_process import own_children

KEY = "reward.custom_reward_function"
PATIENTLY, ENOUGH_S = "reward.scorer_pool.timeout_s=300", 300.0
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
GOOD = f"{HEAD}    return float(ground_truth in solution_str)\n"
ROWS = [
    PromptRow((ChatMessage("user", "?"),), "mine", str(number), {"index": number}, f"row {number}")
    for number in range(3)
]


def tried(tmp_path: Path, source: str, *settings: str) -> list[TrialAnswer]:
    path = tmp_path / "score.py"
    path.write_text(source)
    config = load_config(None, [f"{KEY}.path={path}", PATIENTLY, *settings])
    answers, _ = try_responses(config, [(row, made_up_response(row)) for row in ROWS], ENOUGH_S)
    assert own_children() == []
    return answers


def test_a_good_function_scores_a_made_up_response_to_each_row(tmp_path: Path) -> None:
    answers = tried(tmp_path, GOOD, f"{KEY}.reward_kwargs={{bonus: 1}}")
    assert [one.score for one in answers] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("import nowhere", "compute_score", r"score\.py.*No module named 'nowhere'.*line 1"),
        (GOOD, "grade", r"score\.py defines no function 'grade', but compute_score; define"),
        ("def grade(answer): return 1", "grade", r"grade\(answer\) cannot be called"),
        ("import sys; sys.exit(4)", "grade", r"score\.py ended with code 4"),
        ("import os; os.kill(os.getpid(), 11)", "grade", r"score\.py ended with SIGSEGV"),
        ("held = bytearray(2**33)", "grade", r"score\.py fails to import: MemoryError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_with_file_name_and_reason(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tried(tmp_path, source, f"{KEY}.name={name}")


def test_an_exception_in_every_call_is_one_problem_with_the_authors_last_frames(
    tmp_path: Path,
) -> None:
    source = f"def inner(info):\n    return info['nokey']\n\n{HEAD}    return inner(extra_info)\n"
    found = trial_finding("score", [row.place for row in ROWS], tried(tmp_path, source))
    assert found.severity == "problem"
    first, *frames = found.what.splitlines()
    assert first.endswith("row 0: unscorable: KeyError: 'nokey' in inner (score.py:2)")
    assert [frame.split(" in ")[1] for frame in frames] == [
        "inner: return info['nokey']",
        "compute_score: return inner(extra_info)",
    ]


def test_results_without_a_usable_score_are_a_problem(tmp_path: Path) -> None:
    answers = tried(tmp_path, f"{HEAD}    return {{'acc': 1.0}}\n")
    assert only([trial_finding("score", ["a", "b", "c"], answers)], "problem")


@pytest.mark.parametrize("truth", ['["4"]', '["x; y"]'])
def test_a_list_for_a_scorer_that_compares_with_one_text_is_a_problem_that_names_the_row(
    truth: str,
) -> None:
    one = PromptRow(ROWS[0].messages, "openai/gsm8k", truth, {}, "row 0", truth_is_json=True)
    pair = (one, made_up_response(one))
    answers, _ = try_responses(load_config(None, [PATIENTLY]), [pair], ENOUGH_S)
    found = trial_finding(BUILT_IN, ["row 0"], answers)
    assert found.severity == "problem"
    assert found.what.endswith(
        f"row 0: unscorable: data_source 'openai/gsm8k': ground_truth is {truth}, and the scorer "
        "gsm8k compares with text alone"
    )
    assert found.remedy.startswith("write the answer as text, or set reward.custom_reward_function")


def test_an_exception_in_some_rows_is_a_warning(tmp_path: Path) -> None:
    answers = tried(tmp_path, f"{HEAD}    return 1 / extra_info['index']\n")
    found = only([trial_finding("score", ["a", "b", "c"], answers)], "warning")
    assert "1 of 3 rows and a made-up response; a: unscorable: ZeroDivisionError" in found.what


def test_a_function_without_a_score_for_wrong_responses_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(f"{HEAD}    if ground_truth in solution_str:\n        return 1.0\n")
    config = load_config(None, [f"{KEY}.path={path}", PATIENTLY])
    answers, _ = try_responses(config, [(ROWS[0], "0"), (ROWS[0], "I do not know.")], ENOUGH_S)
    found = only(list(wrong_response_findings("score", answers[:1], answers[1:])), "warning")
    assert found.what.startswith("score has no score for the response 'I do not know.': unscorable")
    assert list(wrong_response_findings("score", answers[1:], answers[1:])) == []


def test_a_filter_metric_that_the_function_does_not_return_is_a_problem() -> None:
    groups = load_config(
        None, ["algorithm.filter_groups={enable: true, metric: accuracy}"]
    ).algorithm.filter_groups
    found = only(list(metric_findings(groups, [TrialAnswer(1.0, {"acc": 1.0})])), "problem")
    assert "filter_groups.metric: the scorer returned no 'accuracy'; available: acc" in found.what
    for answer in (TrialAnswer(1.0, {"accuracy": 0.0}), TrialAnswer(failure="unscorable: x")):
        assert list(metric_findings(groups, [answer])) == []


def test_a_function_that_hangs_is_killed_and_named(tmp_path: Path) -> None:
    source = f"import time\n{HEAD}    time.sleep(1000)\n"
    answers = tried(tmp_path, source, "reward.scorer_pool.timeout_s=0.2")
    assert answers
    assert all(one.failure.startswith("scorer_timeout") for one in answers)


def test_reward_try_shows_scores_prints_and_failures_of_a_real_process(tmp_path: Path) -> None:
    function = tmp_path / "score.py"
    function.write_text(
        f"{HEAD}    print('graded', ground_truth)\n"
        "    return {'score': 10 / len(solution_str), 'acc': 1.0, 'pred': solution_str}\n"
    )
    responses = tmp_path / "responses.jsonl"
    lines = [
        {"response": text, "data_source": "mine", "ground_truth": "4"} for text in ("12345", "")
    ]
    responses.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "sluice", "reward", "try", str(function)]
    ended = subprocess.run(
        [*command, "--responses", str(responses)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "line 1: score 2 acc=1 pred='12345'" in ended.stdout
    assert "line 2: failed: unscorable: ZeroDivisionError" in ended.stdout
    assert "score.py:3 in compute_score: return {'score'" in ended.stdout
    assert ended.stderr.count("graded 4") == 2
    assert "1 of 2 scored" in ended.stderr
