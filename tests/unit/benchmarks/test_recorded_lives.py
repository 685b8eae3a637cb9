"""A reward service that starts anew appends to the same file, with times of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.simulator.fit import FittedWorkload, fit_run
from benchmarks.simulator.group_records import GroupRecord, read_groups
from sluice.errors import DataError

STEP = '{"step":%d,"training/global_step":%d,"timing_s/step":1,"rollout/replicas":1}\n'


def line(
    prompt: str,
    begin: float,
    *,
    instance_id: str | None = None,
    end: str = "trained",
    step: int | None = None,
    seconds: float = 1.0,
) -> GroupRecord:
    """A group of two samples of 100 tokens that ended a second after these were there."""
    return GroupRecord(
        *(prompt, prompt, end, int(end == "trained"), 2, [100, 100]),
        started_s=begin,
        generated_s=begin + seconds,
        ended_s=begin + seconds + 1.0,
        replicas=["r"],
        step=step,
        instance_id=instance_id,
    )


def written(folder: Path, *records: GroupRecord) -> Path:
    file = folder / "groups.jsonl"
    rows = [msgspec.to_builtins(record) for record in records]
    for row in rows:  # what a reader adds
        del row["life"], row["is_redone"]
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    steps = "".join(STEP % (step, step) for step in (1, 2))
    (folder / "metrics.jsonl").write_text(steps, encoding="utf-8")
    return file


def test_a_line_is_of_the_life_whose_instance_it_names(tmp_path: Path) -> None:
    # The second service was up for longer when its first group ended than the first one ever.
    file = written(
        tmp_path,
        line("a", 0.0, instance_id="x"),
        line("b", 1.0, instance_id="x"),
        line("c", 50.0, instance_id="y"),
        line("d", 7.0, instance_id="z"),
    )
    assert [group.life for group in read_groups(file)] == [0, 0, 1, 2]


def test_in_an_older_file_a_life_begins_where_the_time_of_the_end_falls(tmp_path: Path) -> None:
    file = written(tmp_path, line("a", 5.0), line("b", 6.0), line("c", 1.0), line("d", 9.0))
    assert [group.life for group in read_groups(file)] == [0, 0, 1, 1]
    # A service of this version goes on with an older one's file.
    file = written(tmp_path, line("a", 5.0), line("b", 9.0, instance_id="x"))
    assert [group.life for group in read_groups(file)] == [0, 1]


def test_groups_come_again_life_after_life(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        line("b", 6.0, instance_id="x"),
        line("a", 5.0, instance_id="x"),
        line("d", 2.0, instance_id="y"),
        line("c", 1.0, instance_id="y"),
    )
    workload = FittedWorkload(read_groups(file))
    assert [workload.prompt(position, 0).key for position in range(4)] == ["a", "b", "c", "d"]


def test_groups_of_two_lives_did_not_run_beside_each_other(tmp_path: Path) -> None:
    # One group takes 10 ms a token, two beside each other 15 ms: 5 ms, and 2.5 for each sequence.
    # Where one of the lives has one group, by its service's clock, the other one has two.
    one, two = {"seconds": 1.0}, {"seconds": 1.5}
    written(
        tmp_path,
        line("a", 0.0, instance_id="x", **one),
        line("b", 10.0, instance_id="x", **two),
        line("c", 10.0, instance_id="x", **two),
        line("d", 0.0, instance_id="y", **two),
        line("e", 0.0, instance_id="y", **two),
        line("f", 10.0, instance_id="y", **one),
    )
    fleet = fit_run(tmp_path, slots=8, slack=1.0).fleet
    assert fleet.base_step_s == pytest.approx(0.005)
    assert fleet.per_sequence_s == pytest.approx(0.0025)


def test_a_prompt_that_was_drawn_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        line("a", 0.0, instance_id="x", step=1),
        line("b", 1.0, instance_id="x", end="filtered_all_wrong"),
        line("c", 2.0, instance_id="x", step=2),
        line("b", 0.0, instance_id="y", end="filtered_all_wrong"),
        line("c", 1.0, instance_id="y", step=2),
    )
    assert [group.is_redone for group in read_groups(file)] == [False, True, True, False, False]
    assert [group.life for group in fit_run(tmp_path, slots=8, slack=1.0).groups] == [0, 1, 1]


def test_of_a_step_that_was_done_again_the_earlier_batch_does_not_count(tmp_path: Path) -> None:
    # The service lived on; only the trainer went back to step 1, and trains other prompts.
    file = written(
        tmp_path,
        line("a", 0.0, instance_id="x", step=1),
        line("b", 1.0, instance_id="x", step=2),
        line("c", 1.0, instance_id="x", step=2),
        line("d", 2.0, instance_id="x", step=3),
        line("e", 2.5, instance_id="x", end="filtered_all_wrong"),
        line("f", 3.0, instance_id="x", step=2),
        line("g", 3.0, instance_id="x", step=2),
        line("h", 4.0, instance_id="x", step=3),
    )
    redone = [group.prompt_id for group in read_groups(file) if group.is_redone]
    assert redone == ["b", "c", "d"]  # what the record cannot tell of e counts


def test_a_step_that_two_lives_trained_one_after_the_other_counts_once(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        line("a", 1.0, instance_id="x", step=2),
        line("b", 1.0, instance_id="y", step=2),
    )
    assert [group.is_redone for group in read_groups(file)] == [True, False]


def test_groups_that_failed_take_time_and_do_not_come_again(tmp_path: Path) -> None:
    # a is slower than c since b, which failed, ran beside it.
    a, c = line("a", 0.0, seconds=1.5), line("c", 10.0)
    failed = line("b", 0.0, end="dropped_failed", seconds=1.5)
    written(tmp_path, a, failed, c)
    fitted = fit_run(tmp_path, slots=8, slack=1.0)
    assert [group.prompt_id for group in fitted.groups] == ["a", "c"]
    assert fitted.fleet.per_sequence_s == pytest.approx(0.0025)
    written(tmp_path, failed)
    with pytest.raises(DataError, match="no group was kept or filtered"):
        fit_run(tmp_path, slots=8, slack=1.0)
