"""The summary that closes `make test`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import run_checks
from tools.run_checks import Result, summary

PASSED = Result("lint", passed=True, seconds=1.0)
TESTED = Result("tests", False, 2.0, counts={"passed": 7, "failed": 1, "skipped": 2})


def test_the_summary_is_one_json_object_that_names_what_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = json.loads(summary([PASSED, TESTED], seconds=3.0))
    assert figures["ok"] is False
    assert figures["failed_checks"] == ["tests"]
    assert figures["tests"] == {"passed": 7, "failed": 1, "skipped": 2}
    assert capsys.readouterr().out == "7 passed, 1 failed, 2 skipped\n"


def test_without_tests_no_counts_are_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(summary([PASSED], seconds=1.0))["ok"] is True
    assert capsys.readouterr().out == ""


def test_a_missing_tool_fails_its_check_and_says_how_to_get_it() -> None:
    result = run_checks.run_command("x", ["no-such-tool-anywhere"])
    assert not result.passed
    assert "run `make test`" in result.output


def test_counts_come_from_the_report_and_a_missing_report_is_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert run_checks.read_counts(report) == {"passed": 0, "failed": 1, "skipped": 0}
    report.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>'
    )
    assert run_checks.read_counts(report) == {"passed": 4, "failed": 2, "skipped": 3}


def test_real_processes_have_a_run_of_their_own() -> None:
    runs = dict(run_checks.pytest_runs())
    assert any("tests/unit" in folders for folders in runs.values())
    assert all("tests/multiprocess" not in f or len(f) == 1 for f in runs.values())
    assert not any("tests/support" in folders for folders in runs.values())
