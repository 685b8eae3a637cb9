"""A small `make demo-clients`: many clients on a run in training, some of which vanish."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT
from tools.client_demo.__main__ import NODE, NODE_PACKAGES, PYTHON

HAS_NODE = shutil.which("node") is not None and (NODE_PACKAGES / "@grpc").is_dir()
LANGUAGES = (PYTHON, NODE) if HAS_NODE else (PYTHON,)


@pytest.mark.timeout(900)
def test_every_prompt_is_answered_once_though_queues_are_full_and_clients_vanish(
    tmp_path: Path,
) -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "tools.client_demo", "--folder", str(tmp_path)),
            *("--prompts", "150", "--clients", "5", "--vanish", "2", "--run", "tiny"),
            *("--slots", "4", "--max-queued", "2", "--max-tokens", "24", "--calm", "2"),
            *("--concurrency", "12"),
            *("--languages", *LANGUAGES),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert finished.stdout, finished.stderr[-3000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert finished.returncode == 0, (report, finished.stderr[-3000:])
    assert (report["answered"], report["lost"], report["failed"]) == (150, 0, 0)
    assert report["answered_twice"] == 0
    assert 1 <= report["vanished"] <= 2  # one may have ended before the signal came
    assert report["vanished_mid_stream"] > 0
    assert report["tried_again"] > 0  # 60 prompts at once for 12 places that training shares
    assert report["slots_left"] == 0
    assert min(report["training_steps_per_minute"].values()) > 0
    assert report["clients"] == 5
