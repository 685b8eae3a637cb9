"""`sluice doctor`: what it prints, for people and for machines, and its exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sluice.cli import doctor as command
from sluice.cli.main import commands
from sluice.doctor.examination import CHECKS, Check
from sluice.doctor.finding import DoctorContext, Finding, fine, problem, warning


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["doctor", *arguments], terminal_width=80)
    return result.exit_code, result.output


def scripted(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    def examine(_: DoctorContext) -> tuple[Finding, ...]:
        return findings

    monkeypatch.setattr(command, "CHECKS", (Check("disk", "space", examine, needs_run=False),))


def test_warnings_leave_the_exit_code_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, fine("5 GiB free"), warning("slow", "it is far", "move it"))
    code, text = invoke()
    assert code == 0
    assert text.splitlines() == [
        "ok      disk            5 GiB free",
        "warning disk            slow",
        "                        why: it is far",
        "                        remedy: move it",
        "No problems, 1 warning. No run was named: name its configuration to check what it needs.",
    ]


def test_a_problem_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, problem("full", "saves fail", "free some"))
    code, text = invoke("data.seed=3")
    assert code == 1
    assert text.splitlines()[-1] == "1 problem, no warnings."


def test_one_object_is_printed_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, problem("full", "saves fail", "free some"))
    code, text = invoke("data.seed=3", "--json")
    assert code == 1
    assert json.loads(text) == {
        "ok": False,
        "has_run": True,
        "problems": 1,
        "warnings": 0,
        "findings": [
            {
                "check": "disk",
                "severity": "problem",
                "what": "full",
                "why": "saves fail",
                "remedy": "free some",
            }
        ],
    }


def test_what_files_and_peers_say_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, problem("a\x1b[2Jb", "c\x1b[2Jd", "[bold]e"))
    assert "\x1b" not in invoke()[1]
    assert "[bold]e" in invoke()[1]


def test_a_wrong_key_is_a_problem_beside_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = tuple(one for one in CHECKS if one.name in {"configuration", "cores"})
    monkeypatch.setattr(command, "CHECKS", checks)
    code, text = invoke("data.sed=3", "trainer.n_gpus_per_node=4096", "trainer.device=cpu")
    assert code == 1
    assert "data.sed: unknown key" in text
    assert "4096 trainer ranks share" in text
