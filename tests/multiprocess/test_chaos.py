"""Twenty seconds of chaos on a whole run; `make chaos` is the long one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.threaded_launch import threaded_launch
from tools.chaos import __main__ as chaos
from tools.chaos import verdict

# Deals a death of the trainer, of the reward service, of a replica and of a scorer, a stop, a
# leave and a join.
SEED, MINUTES, INTERVAL_S, FAULTS = 1906, 0.35, 2.0, 7
ZEROS = ("prompts_lost", "prompts_doubled", "digest_mismatches", "late_waits", "exit_code")


@contextmanager
def no_cable() -> Iterator[str]:
    """A second network would have a replica of a process of its own: 5 s of CPU time."""
    yield "this run has no second network"


@pytest.mark.timeout(900)
def test_no_prompt_is_lost_or_doubled_whatever_dies_stops_joins_or_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "launched_run", threaded_launch)
    monkeypatch.setattr(chaos, "cable", no_cable)
    # A process of a busy machine may see its deadline late, and report the wait meanwhile.
    monkeypatch.setattr(verdict, "_GRACE_S", 60.0)
    (tmp_path / "slow").touch()  # the run's scorer leaves the faults a core
    code = chaos.main(
        [
            *("--minutes", str(MINUTES), "--size", "tiny", "--seed", str(SEED)),
            *("--interval", str(INTERVAL_S), "--folder", str(tmp_path)),
        ]
    )
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0), printed.err[-5000:]
    assert (code, report["failure"]) == (0, "")
    assert sum(report["faults"].values()) + len(report["skipped"]) == FAULTS
    assert {"kill_trainer", "kill_reward"} <= set(report["faults"])
    assert set(report["skipped"]) <= {"kill_replica", "join", "leave", "kill_scorer"}
    assert report["starts"]["trainer"] >= 2
    assert report["steps_trained"] > 0
    assert report["client_prompts"]["trained"] > 0
    assert report["client_prompts"]["refused"] == 0
    assert report["final_accuracy"] is not None
