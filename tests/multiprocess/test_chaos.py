"""Half a minute of chaos on a whole run; `make chaos` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

# Deals a death of the trainer, of the reward service, of a replica and of a scorer, a stop, a
# leave, a join and, where the machine allows it, a partition.
SEED, MINUTES, INTERVAL_S = 1699, 0.6, 3.5
NETWORK = {"partition"}
ZEROS = ("prompts_lost", "prompts_doubled", "digest_mismatches", "late_waits", "exit_code")


@pytest.mark.timeout(900)
def test_no_prompt_is_lost_or_doubled_whatever_dies_stops_joins_or_leaves(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()  # the run's scorer leaves the faults a core
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "tools.chaos", "--minutes", str(MINUTES), "--size", "tiny"),
            *("--seed", str(SEED), "--interval", str(INTERVAL_S), "--folder", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.stdout, finished.stderr[-5000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0), finished.stderr[
        -5000:
    ]
    assert (finished.returncode, report["failure"]) == (0, "")
    assert sum(report["faults"].values()) + len(report["skipped"]) >= 8
    assert {"kill_trainer", "kill_reward"} <= set(report["faults"])
    assert set(report["skipped"]) <= {
        *NETWORK,
        "kill_replica",
        "stop_replica",
        "join",
        "leave",
        "kill_scorer",
    }
    assert report["starts"]["trainer"] >= 2
    assert report["steps_trained"] > 0
    assert report["client_prompts"]["trained"] > 0
    assert report["client_prompts"]["refused"] == 0
    assert report["final_accuracy"] is not None
