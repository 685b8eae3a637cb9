"""The sums of a run's record, its accounting, and records that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import DataError
from sluice.report.run_record import AccuracyPoint, accuracy_of, read_progress
from sluice.report.summary import SUMMARY_NAME, RunSummary, account_views, summarize, write_summary
from tests.support.run_folder import ACCOUNTING, ACCOUNTS, ACCURACY, STEPS, VALIDATIONS, run_folder


def summary(folder: Path, **record: Any) -> RunSummary:
    return summarize(run_folder(folder, **record), seconds_total=99.5, seconds_services=50.25)


def test_the_summary_adds_up_the_record(tmp_path: Path) -> None:
    assert asdict(summary(tmp_path)) == {
        "is_finished": True,
        "is_resumed": False,
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "accuracy_best": 0.75,
        "accuracy_best_step": 2,
        "seconds_total": 99.5,
        "seconds_services": 50.25,
        "seconds_dapo": 3.75,
        "steps": 2,
        "generated_tokens": 3000 - 300 - 200,
        "trained_tokens": 1300,
        "validation_tokens": 500,
        "groups_kept": 8,
        "groups_all_right": 3,
        "groups_all_wrong": 2,
        "surplus_discarded": 0,
        "prompts_submitted": 20,
        "prompts_trained": 8,
        "prompts_filtered": 6,
        "prompts_dropped": 2,
        "prompts_skipped": 0,
        "prompts_pending": 4,
        "prompts_lost": 0,
        "max_staleness_seen": 1,
        "accounts": ACCOUNTS,
    }


def test_a_policy_that_was_not_validated_untrained_has_no_accuracy_before(tmp_path: Path) -> None:
    found = summary(tmp_path, validations=VALIDATIONS[1:])
    assert found.accuracy_before is None
    assert found.as_text().startswith("held-out accuracy 0.750 in 2 steps")


@pytest.mark.parametrize(("submitted", "lost"), [(23, 3), (19, -1)])
def test_prompts_that_the_accounts_cannot_explain_are_lost(
    tmp_path: Path, submitted: int, lost: int
) -> None:
    accounts = {**ACCOUNTS, "submitted": submitted}
    assert summary(tmp_path, accounts=accounts).prompts_lost == lost


def test_groups_that_only_the_trainer_counts_are_lost(tmp_path: Path) -> None:
    accounts = {**ACCOUNTS, "groups_trained": 10, "groups_acknowledged": 8, "prompts_lost": 2}
    assert summary(tmp_path, accounts=accounts).prompts_lost == 2


def test_the_text_for_people_shows_the_sum_of_the_prompts(tmp_path: Path) -> None:
    text = summary(tmp_path).as_text()
    assert "0.250 -> 0.750 in 2 steps" in text
    assert "20 submitted = 8 trained + 6 filtered + 2 dropped + 4 pending; 0 lost" in text


def test_the_text_for_people_tells_where_tokens_and_time_went(tmp_path: Path) -> None:
    text = summary(tmp_path, accounts={**ACCOUNTS, **ACCOUNTING}).as_text()
    assert text.splitlines()[-3:] == [
        "all tokens (3,000): trained 60.0%, filtered all right 25.0%, pending 15.0%; "
        "unaccounted 0.0%",
        "trainer's time (4 s): training 50.0%, waiting for batch 37.5%; unaccounted 12.5%",
        "replicas' time (10 s): generating 90.0%, idle 10.0%; unaccounted 0.0%",
    ]
    assert "all tokens" not in summary(tmp_path).as_text()


def test_a_run_that_did_not_end_is_summed_up_so_far(tmp_path: Path) -> None:
    found = summary(tmp_path, accounts=None)
    assert (found.is_finished, found.steps) == (False, 2)
    assert found.generated_tokens == 1900  # as the steps say; they have no accounts
    assert found.as_text().startswith("not finished: the numbers so far\nheld-out accuracy 0.250")
    live = summarize(run_folder(tmp_path, accounts=None), accounts=ACCOUNTS)
    assert (live.is_finished, live.prompts_submitted, live.generated_tokens) == (False, 20, 2500)


def test_a_resumed_run_counts_the_tokens_of_all_its_starts(tmp_path: Path) -> None:
    counts = (1500.0, 700.0)  # the second step is of another start, which ends with 3000
    steps = [
        {**row, "accounts/generated_tokens": count}
        for row, count in zip(STEPS, counts, strict=True)
    ]
    found = summary(tmp_path, steps=steps, accounts={**ACCOUNTS, **ACCOUNTING})
    assert (found.is_resumed, found.generated_tokens) == (True, 1500 + 3000 - 500)
    assert "100 s since the last start" in found.as_text()
    assert "all tokens since the last start (3,000)" in found.as_text()


def test_an_unfinished_run_shows_no_count_that_it_does_not_know(tmp_path: Path) -> None:
    text = summary(tmp_path, accounts=None).as_text()
    assert "groups: 8 kept, 3 all right, 2 all wrong" in text
    assert "prompts:" not in text


def test_a_run_that_was_never_validated_has_no_accuracy(tmp_path: Path) -> None:
    found = summary(tmp_path, validations=())
    assert (found.accuracy_before, found.accuracy_after) == (None, None)
    assert found.as_text().startswith("held-out accuracy not measured in 2 steps")


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"step": 3, ', b"\xff\x00", b"5", b'{"step": "x"}', b"{}"),
        *(b'{"step": Infinity}', b"[" * 100_000),
    ],
    ids=range(7),
)
def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path, line: bytes) -> None:
    file = run_folder(tmp_path) / "metrics.jsonl"
    before = read_progress(tmp_path)
    file.write_bytes(line + b"\n" + file.read_bytes())
    assert read_progress(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff", b"5"])
def test_a_broken_file_of_accounts_is_named(tmp_path: Path, content: bytes) -> None:
    (run_folder(tmp_path) / "accounts.json").write_bytes(content)
    with pytest.raises(DataError, match=r"accounts\.json: not a JSON object .*; remove the file"):
        read_progress(tmp_path)


def test_a_line_being_written_is_left_for_later(tmp_path: Path) -> None:
    file = run_folder(tmp_path) / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 3, "training/glo')
    assert len(read_progress(tmp_path).steps) == 2


def test_a_step_that_a_resumed_run_did_again_counts_once_by_its_last_numbers(
    tmp_path: Path,
) -> None:
    again = {**STEPS[1], "train/trained_tokens": 50.0}
    record = read_progress(run_folder(tmp_path, steps=[*STEPS, again]))
    assert [row["step"] for row in record.steps] == [1, 2]
    assert record.total("train/trained_tokens") == 650.0


def test_what_a_run_gave_up_when_it_went_back_does_not_count(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, steps=[*STEPS, {**STEPS[1], "step": 3}])
    before = read_progress(folder)
    assert (before.last_step, before.accuracies()[-1].step) == (3, 2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(STEPS[0]) + "\n")
    after = read_progress(folder)
    assert after.steps == (STEPS[0],)
    assert after.last_step == 1
    assert [point.step for point in after.accuracies()] == [0]


def test_a_folder_without_any_record_is_empty_progress(tmp_path: Path) -> None:
    record = read_progress(tmp_path)
    assert (record.steps, record.validations, record.accounts) == ((), (), {})


@pytest.mark.parametrize(
    ("row", "accuracy"),
    [
        ({ACCURACY: 0.25}, 0.25),
        ({ACCURACY: 0.25, "val-core/gsm8k/acc/mean@2": 0.75}, 0.5),
        ({ACCURACY: None}, None),
        ({"val-aux/math_dapo/acc/mean@2": 0.5, "val-core/math_dapo/acc/maj@2/mean": 0.5}, None),
        ({}, None),
    ],
)
def test_accuracy_is_the_mean_over_samples_and_data_sources(
    row: Mapping[str, float | None], accuracy: float | None
) -> None:
    assert accuracy_of(row) == accuracy


def test_accuracies_come_by_step_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    record = read_progress(run_folder(tmp_path, validations=VALIDATIONS[::-1]))
    assert record.accuracies() == (AccuracyPoint(0, 0.25), AccuracyPoint(2, 0.75))


def test_parts_come_by_size_and_what_is_next_to_nothing_is_left_out() -> None:
    accounting = {**ACCOUNTS, **ACCOUNTING, "tokens/stale": 1.0}
    tokens, trainer, rollout = account_views(accounting)
    assert [part.name for part in tokens.parts] == ["trained", "filtered all right", "pending"]
    assert [part.share for part in tokens.parts] == [0.6, 0.25, 0.15]
    assert tokens.total_text == "3,000"
    assert trainer.parts_text == "training 50.0%, waiting for batch 37.5%; unaccounted 12.5%"
    assert (rollout.title, rollout.total_text, rollout.residual) == ("rollout", "10 s", 0.0)


def test_an_account_that_is_not_there_is_not_shown() -> None:
    assert account_views({}) == ()
    assert account_views(ACCOUNTS) == ()
    without_tokens = {name: n for name, n in ACCOUNTING.items() if not name.startswith("tokens")}
    assert [view.title for view in account_views(without_tokens)] == ["trainer", "rollout"]


def test_the_age_of_an_older_account_is_shown() -> None:
    accounting = {"generated_tokens": 4.0, "tokens_residual": 0.0, "tokens/stale": 4.0}
    (fresh,) = account_views({**accounting, "tokens_age_s": 0.2})
    assert fresh.parts_text == "stale 100.0%; unaccounted 0.0%"
    (old,) = account_views({**accounting, "tokens_age_s": 34.4})
    assert (old.parts_text, old.age_s) == ("stale 100.0%; unaccounted 0.0%, 34 s ago", 34.4)


def test_nothing_at_all_has_no_shares() -> None:
    (view,) = account_views({"generated_tokens": 0.0, "tokens_residual": 0.0, "tokens/stale": 0.0})
    assert view.parts_text == "none; unaccounted 0.0%"


def test_a_reader_of_a_summary_that_is_replaced_reads_the_former_one_whole(tmp_path: Path) -> None:
    write_summary(tmp_path, {"steps": 1})
    with (tmp_path / SUMMARY_NAME).open(encoding="utf-8") as former:
        write_summary(tmp_path, {"steps": 2})
        assert json.load(former) == {"steps": 1}
    assert json.loads((tmp_path / SUMMARY_NAME).read_text(encoding="utf-8")) == {"steps": 2}
    assert [file.name for file in tmp_path.iterdir()] == [SUMMARY_NAME]
