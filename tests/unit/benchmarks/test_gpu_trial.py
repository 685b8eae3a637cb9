"""A trial on GPUs says which of its parts passed, failed, or could not run, whatever they do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_smoke import __main__ as smoke
from benchmarks.gpu_smoke import day1
from benchmarks.gpu_smoke.parts import Part, run_trial
from benchmarks.gpu_smoke.quickstart import LAYOUTS, overrides
from sluice.config.derived import replica_devices, world_size
from sluice.config.loading.loader import load_config
from tests.support.accelerator import REHEARSAL_VARIABLE
from tests.support.source_tree import ROOT


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    return sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"


GOOD = Part(60, printing('a line\n{"speed": 3}'))


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REHEARSAL_VARIABLE, "1")


def tried(parts: dict[str, Part], folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = run_trial("A trial.", "gpu_smoke", parts, ["--report", str(folder), *arguments])
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return status, report


def test_figures_of_a_part_are_those_of_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = tried({"good": GOOD}, tmp_path)
    assert (status, report["passed"], report["good"]) == (0, ["good"], {"speed": 3})
    assert {"date", "device", "torch", "seconds"} <= report.keys()
    assert report["rehearsal"] is True
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Part(60, GOOD.command, devices=99), "it takes 99 GPUs"),
        (Part(60, GOOD.command, package="no_such_engine"), "no_such_engine is not installed"),
        (
            Part(60, printing("SKIPPED [2] tests/a.py: needs 4 GPUs\n2 skipped in 0.1s")),
            "needs 4 GPUs",
        ),
    ],
    ids=["devices", "package", "all tests skipped"],
)
def test_a_part_that_lacks_something_says_so_and_has_not_passed(
    part: Part, why: str, tmp_path: Path
) -> None:
    status, report = tried({"good": GOOD, "lacking": part}, tmp_path)
    assert (status, report["passed"], report["failed"]) == (0, ["good"], [])
    assert why in report["missing"]["lacking"]
    assert tried({"lacking": part}, tmp_path)[0] == 1, "nothing passed"


def test_a_part_that_fails_or_hangs_keeps_no_other_from_running(tmp_path: Path) -> None:
    hanging = Part(0.2, (sys.executable, "-c", "import time; time.sleep(600)"))
    parts = {"bad": Part(60, printing("why", 3)), "hanging": hanging, "good": GOOD}
    status, report = tried(parts, tmp_path)
    assert (status, report["passed"], report["failed"]) == (1, ["good"], ["bad", "hanging"])
    assert report["bad"]["failure"] == "exit code 3"
    assert "not done after" in report["hanging"]["failure"]
    assert (tmp_path / "bad.log").read_text(encoding="utf-8") == "why\n"


def test_tests_that_were_left_out_of_a_part_are_named(tmp_path: Path) -> None:
    printed = "SKIPPED [1] tests/a.py:3: needs 4 GPUs and torch finds 2\n5 passed, 1 skipped in 2s"
    _, report = tried({"tests": Part(60, printing(printed))}, tmp_path)
    assert report["passed"] == ["tests"]
    assert report["tests"]["skipped"] == ["tests/a.py:3: needs 4 GPUs and torch finds 2"]


def test_the_deadlines_of_a_trial_on_one_gpu_add_up_to_ten_minutes() -> None:
    assert sum(part.seconds for part in smoke._PARTS.values()) <= 600


@pytest.mark.parametrize("parts", [smoke._PARTS, day1._PARTS], ids=["smoke", "day 1"])
def test_parts_run_programs_that_exist(parts: dict[str, Part]) -> None:
    for part in parts.values():
        for command in filter(None, (part.command, part.rehearsal)):
            assert command[0] == sys.executable
            for word in command[1:]:
                if word.startswith("benchmarks."):
                    path = ROOT / word.replace(".", "/")
                    assert path.with_suffix(".py").is_file() or path.is_dir()
                if word.startswith("tests/"):
                    assert (ROOT / word).exists()


@pytest.mark.parametrize(
    ("layout", "devices"), [("one_gpu", 2), ("nccl", 2), ("vllm", 2), ("shards", 4)]
)
def test_a_layout_takes_the_gpus_that_its_part_asks_for(
    layout: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one on one GPU shares it, so that its weights cannot travel by NCCL."""
    monkeypatch.delenv(REHEARSAL_VARIABLE)
    config = load_config(None, overrides(layout))
    assert world_size(config) + replica_devices(config) == devices
    assert (config.sluice.weights.backend == "gloo") is (layout == "one_gpu")
    assert {config.trainer.device, config.sluice.rollout.device} == {"cuda"}
    named = {part.command[-1]: part.devices for part in day1._PARTS.values()}
    assert named.get(layout, devices) == devices
    assert set(LAYOUTS) == {"one_gpu", "nccl", "vllm", "shards"}
