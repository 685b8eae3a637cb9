"""The table of docs/engines.md, from reports of pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.generate_engines_table import read_circumstances, read_report, table

REPORT = """<testsuites><testsuite timestamp="2026-11-22T14:00:00.1+00:00"><properties>
<property name="code" value="abc1234"/><property name="versions" value="torch 2.13.0"/>
<property name="code" value="abc1234"/><property name="versions" value="torch 2.13.0"/></properties>
<testcase classname="tests.x.TestTorchContract" name="test_one_rule[llama]"/>
<testcase classname="tests.x.TestTorchContract" name="test_one_rule[qwen3]"><failure/></testcase>
<testcase classname="tests.x.TestTorchLifecycle" name="test_another"/>
<testcase classname="tests.x" name="test_of_no_rule"/>
</testsuite></testsuites>"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.xml"
    path.write_text(REPORT, encoding="utf-8")
    return path


def test_a_rule_is_kept_only_where_every_case_of_it_was(report: Path) -> None:
    assert table({"torch": read_report(report)}).splitlines()[2:] == [
        "| one rule | **broken** (1 of 2) |",
        "| another | kept (1) |",
    ]


def test_a_report_tells_its_day_commit_and_versions(report: Path) -> None:
    assert read_circumstances(report) == "2026-11-22, abc1234, torch 2.13.0"


def test_a_report_that_tells_none_of_them_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text("<testsuites><testsuite/></testsuites>", encoding="utf-8")
    assert read_circumstances(path) == ""
