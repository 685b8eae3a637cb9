"""A short fuzz run over all methods of a live run; `make fuzz` is the long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.threaded_launch import threaded_launch
from tools import launched_run
from tools.fuzz import __main__ as fuzz
from tools.fuzz import openai_traffic, traffic

REQUESTS = 700
# The long run makes few of these; here each has to come.
MORE_OFTEN = {"Evaluate": 0.5, "AnnouncePolicy": 0.5}


@pytest.mark.timeout(900)
def test_hostile_requests_neither_crash_the_services_nor_leave_anything_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launched_run, "launched_run", threaded_launch)
    monkeypatch.setattr(traffic, "_SHARES", {**traffic._SHARES, **MORE_OFTEN})
    arguments = ("--requests", str(REQUESTS), "--seed", "7", "--folder", str(tmp_path))
    code = fuzz.main(arguments)
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert (report["crashes"], report["leaks"]) == (0, 0), printed.err[-3000:]
    assert code == 0
    assert report["requests"] >= REQUESTS
    assert report["leased"] > 0
    called = set(report["by_method"])
    assert called >= {openai_traffic.CHAT, openai_traffic.END}
    assert called >= {method.name for method in traffic.all_methods()} - {
        "TrainerService/SaveCheckpoint"
    }
