"""A short fuzz run over all methods of a live run; `make fuzz` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT
from tools.fuzz import front_traffic
from tools.fuzz.traffic import all_methods


@pytest.mark.timeout(900)
def test_hostile_requests_neither_crash_the_services_nor_leave_anything_behind(
    tmp_path: Path,
) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "tools.fuzz", "--requests", "3000", "--seed", "7"),
            *("--folder", str(tmp_path)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.stdout, finished.stderr[-3000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert (report["crashes"], report["leaks"]) == (0, 0), finished.stderr[-3000:]
    assert report["requests"] >= 3000
    assert report["leased"] > 0
    called = set(report["by_method"])
    assert called >= {front_traffic.CHAT, front_traffic.END}
    assert called >= {method.name for method in all_methods()} - {"TrainerService/SaveCheckpoint"}
