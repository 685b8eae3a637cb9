"""Stored responses: what a kill leaves, damage, and grades that come back as they were."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sluice.errors import DataError
from sluice.evaluation.stored_responses import (
    StoredGrade,
    StoredSample,
    read_at,
    read_responses,
    response_files,
)
from sluice.types import Failed, FailureKind, Outcome, Scored
from tests.support.stored_evaluation import graded, store


def positions(file: Path) -> list[int]:
    return [prompt.position for _, prompt in read_responses(file)]


def test_a_last_line_that_a_kill_cut_short_is_an_unfinished_prompt(tmp_path: Path) -> None:
    file = store(tmp_path, [graded(0, 1.0), graded(1, 0.0)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert positions(file) == [0]
    file.write_bytes(whole[:-30])
    assert positions(file) == [0]


def test_damage_before_the_last_line_names_file_and_line(tmp_path: Path) -> None:
    file = store(tmp_path, [graded(0, 1.0), graded(1, 0.0)])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b'{"position": \n' + lines[1])
    with pytest.raises(DataError, match=r"math\.jsonl, line 2: .*delete the line"):
        positions(file)


def test_a_prompt_stored_twice_counts_once(tmp_path: Path) -> None:
    file = store(tmp_path, [graded(0, 1.0), graded(0, 0.0), graded(1, 0.0)])
    found = {prompt.position: prompt for _, prompt in read_responses(file)}
    assert found[0].samples[0].reward == 1.0
    assert len(found) == 2


def test_a_prompt_is_read_again_at_its_offset(tmp_path: Path) -> None:
    file = store(tmp_path, [graded(0, 1.0), graded(7, 0.0), graded(2, 0.0)])
    places = [(offset, prompt.key) for offset, prompt in read_responses(file)]
    assert [one.position for one in read_at(file, places[::-1])] == [2, 7, 0]


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_file_that_was_written_again_is_no_damaged_one(tmp_path: Path, left_out: int) -> None:
    prompts = [graded(number, 1.0) for number in range(4)]
    file = store(tmp_path, prompts)
    places = [(offset, prompt.key) for offset, prompt in read_responses(file)]
    store(tmp_path, prompts[left_out:])
    with pytest.raises(DataError, match=r"math\.jsonl: .*written it again; repeat the command"):
        list(read_at(file, places))


@pytest.mark.parametrize(
    "outcome",
    [
        Scored(1.0, 0.25, {"acc": 1.0, "overlong_reward": -0.75}, "4"),
        Scored(0.1 + 0.2, 0.1 + 0.2, {}),
    ],
)
def test_a_grade_comes_back_from_its_file_as_it_was(outcome: Outcome) -> None:
    stored = msgspec.json.encode(StoredSample("").graded(outcome))
    assert msgspec.json.decode(stored, type=StoredSample).scored == outcome


def test_a_failure_is_stored_with_its_kind_and_has_no_score() -> None:
    failed = StoredSample("", 1.0).graded(Failed(FailureKind.SCORER_CRASH, "it ended"))
    assert failed.grade == StoredGrade(failure="scorer_crash: it ended")
    assert failed.scored is None


def test_a_folder_without_responses_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no responses/\*\.jsonl; give the --output folder"):
        response_files(tmp_path)
