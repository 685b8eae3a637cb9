"""Ended groups on disk: bounded, whole lines, readable again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry.samples import (
    SampleArchive,
    SampledGroup,
    archive_files,
    sampled_group,
    shorten_middle,
)
from sluice.types import (
    Failed,
    FailureKind,
    FinishReason,
    GradedGroup,
    PromptEnd,
    Rollout,
    RolloutGroup,
    Scored,
    VersionSpan,
)
from tests.support.client_prompt import client_prompt


def held(folder: Path) -> list[int]:
    return [
        json.loads(line)
        for path in archive_files(folder)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize("lines_at_once", [1, 7, 5000])
def test_the_archive_keeps_the_newest_lines_within_its_bound(
    tmp_path: Path, lines_at_once: int
) -> None:
    folder, max_bytes = tmp_path / "samples", 8_000
    archive = SampleArchive(folder, max_bytes)
    lines = [b"%06d" % number for number in range(1_000_000, 1_005_000)]
    for begin in range(0, len(lines), lines_at_once):
        archive.append(lines[begin : begin + lines_at_once])
        size = sum(path.stat().st_size for path in archive_files(folder))
        assert size <= max_bytes + 8
    numbers = held(folder)
    assert numbers == list(range(1_005_000 - len(numbers), 1_005_000))
    assert len(numbers) >= 0.75 * max_bytes / 8


def test_an_archive_that_is_taken_up_again_begins_a_file_and_keeps_the_others(
    tmp_path: Path,
) -> None:
    SampleArchive(tmp_path, 1 << 20).append([b"1"])
    first = archive_files(tmp_path)[0]
    first.write_bytes(first.read_bytes() + b'{"torn')
    SampleArchive(tmp_path, 1 << 20).append([b"2"])
    assert [path.read_bytes() for path in archive_files(tmp_path)] == [b'1\n{"torn', b"2\n"]


def test_a_line_that_a_full_disk_cut_off_never_joins_the_next_one(tmp_path: Path) -> None:
    archive = SampleArchive(tmp_path, 1 << 20)
    archive.append([b"1"])
    (file,) = archive_files(tmp_path)
    file.write_bytes(file.read_bytes() + b'{"torn')
    archive.append([b"2"])
    assert file.read_bytes() == b'1\n{"torn\n2\n'


def test_files_that_are_not_the_archives_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("mine")
    archive = SampleArchive(tmp_path, 8)
    archive.append([b"%d" % n for n in range(100)])
    assert (tmp_path / "notes.jsonl").read_text() == "mine"


@given(st.text(max_size=300), st.integers(1, 100))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, most: int) -> None:
    found = shorten_middle(text, most)
    if len(text) <= most:
        assert found == text
        return
    tail = most // 4
    assert found.startswith(text[: most - tail])
    assert found.endswith(text[len(text) - tail :])
    assert f"{len(text) - most} characters left out" in found
    assert len(found) <= most + 60


def rollout(number: int, versions: tuple[int, ...]) -> Rollout:
    count = len(versions)
    return Rollout.of_one_turn(
        number,
        np.zeros(count, dtype=np.uint32),
        np.zeros(count, dtype=np.float32),
        tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions)),
        FinishReason.STOP,
        f"response {number}",
    )


def test_a_group_is_kept_with_scores_failures_and_versions() -> None:
    prompt = client_prompt()
    rollouts = (rollout(0, (3, 4)), rollout(1, ()), rollout(2, (4,)))
    outcomes = (
        Scored(1.0, 0.5, {"acc": 1.0}),
        Failed(FailureKind.SCORER_TIMEOUT, "too slow"),
        Scored(float("nan"), 0.0, {}),
    )
    tokens = np.zeros(1, dtype=np.uint32)
    graded = GradedGroup(RolloutGroup(prompt, tokens, rollouts), outcomes)
    kept = sampled_group(
        prompt,
        PromptEnd.TRAINED,
        graded,
        version=3,
        step=5,
        ended_at=1.5,
        replicas=["a"],
        max_chars=100,
    )
    again = msgspec.json.decode(msgspec.json.encode(kept), type=SampledGroup)
    first, second, third = again.responses
    assert (first.score, first.reward, first.versions) == (1.0, 0.5, (3, 4))
    assert first.metrics == {"acc": 1.0}
    assert (second.score, second.versions) == (None, None)
    assert second.failure == "scorer_timeout: too slow"
    assert third.score is None  # what is no number is null
    assert (again.end, again.step, again.version) == ("trained", 5, 3)
    assert again.prompt == "\n".join(turn.content for turn in prompt.messages)


def test_a_group_without_responses_is_kept_with_its_prompt() -> None:
    kept = sampled_group(
        client_prompt(),
        PromptEnd.DROPPED_FAILED,
        None,
        version=0,
        step=None,
        ended_at=0.0,
        replicas=[],
        max_chars=5,
    )
    assert kept.responses == []
    assert kept.prompt
