"""Checks run beside each other; a slow or broken one is reported and keeps nobody else waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from sluice.doctor.examination import CHECKS, Check, examine
from sluice.doctor.files import check_disk
from sluice.doctor.finding import DoctorContext, Finding, fine, read_doctor_context
from sluice.errors import ConfigError
from tests.support.doctor_findings import run_of, severities
from tests.support.source_tree import ROOT


def sound(_: DoctorContext) -> list[Finding]:
    return [fine("all is well")]


def refusing(_: DoctorContext) -> list[Finding]:
    raise ConfigError("the key = 3: too large; set it to 2")


def broken(_: DoctorContext) -> Iterator[Finding]:
    yield fine("the first part")
    raise ZeroDivisionError("division by zero")


def test_a_check_that_hangs_is_a_problem_and_the_others_are_reported_before_it_ends() -> None:
    released = threading.Event()

    def hanging(_: DoctorContext) -> list[Finding]:
        released.wait(60)
        return []

    checks = (
        Check("hanging", "a file system", hanging, deadline_s=0.2),
        Check("sound", "the rest", sound),
    )
    late, other = examine(run_of("data.seed=3"), checks)
    assert not released.is_set()
    released.set()
    assert severities(late.findings) == ["problem"]
    assert late.findings[0].what == "a file system: no answer within 0.2 s"
    assert severities(other.findings) == ["ok"]


def test_a_models_files_that_cannot_be_read_hold_up_no_check_that_needs_them_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, released = threading.Event(), threading.Event()

    def hanging(*_: object) -> None:
        asked.set()
        released.wait(60)

    def shaped(one: DoctorContext) -> list[Finding]:
        return [fine(str(one.shape))]

    monkeypatch.setattr("sluice.doctor.finding.find_shape", hanging)
    run = run_of("actor_rollout_ref.model.path=/mnt/gone")
    assert not asked.is_set(), "the command itself reads no file that may hang"
    checks = (
        Check("sound", "the rest", sound),
        Check("shaped", "the model", shaped, deadline_s=0.2),
        Check("disk", "space", check_disk),
    )
    other, late, disk = examine(run, checks)
    assert asked.wait(60)
    assert not released.is_set()
    released.set()
    assert severities(other.findings) == ["ok"]
    assert "no answer within" in late.findings[0].what
    assert not any("no answer" in one.what for one in disk.findings), "no checkpoint, no shape"


def test_an_error_of_ours_is_a_problem_with_its_remedy() -> None:
    (result,) = examine(run_of("data.seed=3"), (Check("a", "b", refusing),))
    (found,) = result.findings
    assert (found.what, found.remedy) == ("the key = 3: too large", "set it to 2")


def test_a_defect_of_a_check_is_reported_and_hides_no_other() -> None:
    results = list(
        examine(run_of("data.seed=3"), (Check("a", "the disk", broken), Check("b", "c", sound)))
    )
    assert [severities(one.findings) for one in results] == [["problem"], ["ok"]]
    assert results[0].findings[0].what == "the disk: ZeroDivisionError: division by zero"


def test_results_come_in_the_order_of_the_checks() -> None:
    checks = tuple(Check(str(number), "", sound) for number in range(20))
    assert [one.check.name for one in examine(run_of("data.seed=3"), checks)] == [
        str(n) for n in range(20)
    ]


def test_without_a_run_only_what_holds_for_every_run_is_looked_at() -> None:
    checks = (Check("a", "", sound, needs_run=False), Check("b", "", sound))
    nobody = read_doctor_context(None, [], {})
    assert [one.check.name for one in examine(nobody, checks)] == ["a"]
    named = examine(run_of("data.seed=3"), checks)
    assert [one.check.name for one in named] == ["a", "b"]


def test_checks_have_different_names_and_each_is_on_the_page() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in names if f"| `{name}` |" not in page] == []
    of_every_run = [check.name for check in CHECKS if not check.needs_run]
    assert names[: len(of_every_run)] == of_every_run
    assert "The first three apply to every run" in page
    assert len(of_every_run) == 3


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_says_what_it_looks_at_and_ends(check: Check) -> None:
    assert check.about
    assert 0 < check.deadline_s <= 120
