"""A custom function is checked in a process of its own before anything expensive starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.reward.scorer_check import check_custom_function
from sluice.errors import ConfigError, DeadlineError
from tests.support.reward_process import own_children


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "score.py"
    path.write_text(source)
    return str(path)


GOOD = "import os\nPID = os.getpid()\ndef compute_score(**call):\n    return 1.0\n"


def test_a_good_function_passes_and_leaves_no_process(tmp_path: Path) -> None:
    check_custom_function(write(tmp_path, GOOD), reward_kwargs={"bonus": 1})
    assert own_children() == []


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("import nowhere", "compute_score", r"score\.py.*No module named 'nowhere'.*line 1"),
        (GOOD, "grade", r"score\.py defines no function 'grade'"),
        ("def grade(answer): return 1", "grade", r"grade\(answer\) cannot be called"),
        ("import sys; sys.exit(4)", "grade", r"score\.py ended with exit code 4"),
        ("import os; os.kill(os.getpid(), 11)", "grade", r"score\.py ended with signal SIGSEGV"),
        ("held = bytearray(2**33)", "grade", r"score\.py fails to import: MemoryError"),
    ],
)
def test_a_bad_function_is_told_with_file_name_and_error(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_custom_function(write(tmp_path, source), name)
    assert own_children() == []


def test_a_file_that_never_finishes_loading_is_ended(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"loading .*score\.py"):
        check_custom_function(write(tmp_path, "import time; time.sleep(1000)"), timeout_s=1.0)
    assert own_children() == []


def test_the_command_ends_with_one_and_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.reward.scorer_check"]
    good = subprocess.run([*command, write(tmp_path, GOOD)], check=False, capture_output=True)
    assert good.returncode == 0, good.stderr
    broken = subprocess.run(
        [*command, write(tmp_path, "1 / 0"), "compute_score", '{"a": 1}'],
        check=False,
        capture_output=True,
        text=True,
    )
    assert broken.returncode == 1
    assert "ZeroDivisionError" in broken.stderr
    assert "Traceback" not in broken.stderr
