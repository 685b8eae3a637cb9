"""Responses that are programs: graded by the tests that they pass, in a sandbox."""

from __future__ import annotations

import json

import pytest

from services.reward.grading.scorers import program_tests
from services.reward.grading.scorers.program_tests import ProgramTests
from sluice.config.schema.reward import (
    CustomRewardFunctionConfig,
    SandboxFusionConfig,
    ScorerPoolConfig,
)
from sluice.config.schema.service import SandboxConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import ConfigError, SandboxUnavailableError
from sluice.sandbox.choice import limits_of, process_sandbox
from sluice.types import Failed, FailureKind, Scored
from tests.support.sandboxes import BUBBLEWRAP, OWN_COMMAND, need_bubblewrap
from tests.support.scorer_pools import running_scorer_pool, scorer_pool

DOUBLES = json.dumps({"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]})
SUMS = json.dumps({"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]})
MANY = json.dumps({"inputs": [f"{i}\n" for i in range(14)], "outputs": [str(i) for i in range(14)]})

THREADED = """
import threading
threading.Thread(target=lambda: print(2 * int(input()))).start()
"""
LATE = """
import sys, threading, time

def late():
    time.sleep(0.2)
    print(2 * int(input()))

threading.Thread(target=late).start()
sys.exit()
"""
COLLECTING = """
import atexit, io, sys
collected = sys.stdout = io.StringIO()

@atexit.register
def write():
    sys.__stdout__.write(collected.getvalue())

print(2 * int(input()))
"""
FAST = """
import io, os, sys

class FastIO(io.IOBase):
    def __init__(self, file):
        self.descriptor, self.written = file.fileno(), io.BytesIO()
        self.writable = "r" not in file.mode
    def readline(self):
        return os.read(self.descriptor, 8192).decode()
    def write(self, text):
        self.written.write(text.encode())
    def flush(self):
        if self.writable:
            os.write(self.descriptor, self.written.getvalue())

sys.stdin, sys.stdout = FastIO(sys.stdin), FastIO(sys.stdout)
print(2 * int(sys.stdin.readline()))
"""
KEPT = """
import os, sys
standard, sys.stdout = sys.stdout, open(os.devnull, "w")
standard.write(str(2 * int(input())))
"""
EQUAL_TO_ALL = """
class Any(int):
    def __eq__(self, other): return True
def add(a, b):
    return Any(7)
"""
SEARCHING = """
import re
found = ""
for line in open("/proc/self/maps"):
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    if "r" in line.split()[1] and "[v" not in line:
        memory = open("/proc/self/mem", "rb")
        memory.seek(start)
        try:
            seen = memory.read(end - start).decode("latin1")
        except OSError:
            continue
        found = found or "".join(re.findall("expected-out" + "put-[0-9]+", seen)[:1])
print(found)
"""


@pytest.fixture(scope="module")
def grade() -> ProgramTests:
    need_bubblewrap()
    return ProgramTests(process_sandbox(BUBBLEWRAP), limits_of(BUBBLEWRAP), 300.0)


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("```python\nprint(2 * int(input()))\n```", 1.0),
        ("n = int(input())\nprint(2 * n if n < 3 else 0)", 2 / 3),
        ("def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()", 1.0),
        ("import sys\nfor line in sys.stdin:\n    print(2 * int(line))", 1.0),
        ("import sys\nprint(2 * int(sys.stdin.buffer.read()))\nsys.exit()", 1.0),
        ("print(2 * int(open('input.txt').read()))", 1.0),
        ("print(sum(deque([int(input())] * 2)))", 1.0),
        (THREADED, 1.0),
        (COLLECTING, 1.0),
        (FAST, 1.0),
        (KEPT, 1.0),
        ("import sys\nprint(2 * int(input()))\nsys.stdout.close()", 1.0),
        (LATE, 1.0),
        ("x = 2 * int(input())\nprint(x)\nraise ValueError", 0.0),
        ("print(2 * int(input())", 0.0),
        ("import os\nwhile True: os.fork()", 0.0),
        ("while True: print('x' * 1000)", 0.0),
        ("held = bytearray(1 << 40)", 0.0),
        ("import os\nos.kill(os.getppid(), 9)", 0.0),
        ("import os\nos.kill(1, 9)\nos.kill(-1, 9)", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_the_share_of_the_tests_that_a_program_passes(
    grade: ProgramTests, program: str, score: float
) -> None:
    assert grade(program, DOUBLES) == pytest.approx(score)


def test_a_test_that_takes_too_long_fails_and_the_others_count(
    grade: ProgramTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "n = int(input())\nwhile n == 2: pass\nprint(2 * n)"
    # A busy machine may not run the other tests in the first of these times.
    for test_s in (1.5, 20.0):
        monkeypatch.setattr(program_tests, "TEST_S", test_s)
        score = grade(program, DOUBLES)
        if score > 0.5:
            break
    assert score == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", 1.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", 1.0),
        ("def add(a, b):\n    return (1, 2) if a == [1] else 3", 1.0),
        ("def add(a, b):\n    return 3", 0.5),
        ("def sub(a, b):\n    return a - b", 0.0),
        (EQUAL_TO_ALL, 0.0),
        ("def add(a, b):\n    return object()", 0.0),
    ],
)
def test_a_function_is_called_with_the_arguments_of_each_test(
    grade: ProgramTests, program: str, score: float
) -> None:
    assert grade(program, SUMS) == score


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("print(input())", 1.0),
        ("n = int(input())\nprint(n if n else 'x')", 0.9),
        ("n = int(input())\nprint(n if n < 12 else 'x')", 10 / 11),
        ("n = int(input())\nprint(n if n < 12 else 1 // 0)", 10 / 11),
    ],
)
def test_the_first_ten_tests_count_and_a_later_wrong_answer_once(
    grade: ProgramTests, program: str, score: float
) -> None:
    assert grade(program, MANY) == score


def test_a_program_cannot_answer_for_the_scorer(grade: ProgramTests) -> None:
    forged = (
        "import json, os\n"
        "for fd in range(3, 20):\n"
        "    for test in range(3):\n"
        "        line = json.dumps({'test': test, 'end': 'finished', 'output': '?'})\n"
        "        try: os.write(fd, (line + '\\n').encode())\n"
        "        except OSError: pass\n"
    )
    assert grade(forged, DOUBLES) == 0.0


def test_no_expected_output_is_in_the_sandbox(grade: ProgramTests) -> None:
    truth = json.dumps({"inputs": ["1"], "outputs": ["expected-output-4711"]})
    assert grade(SEARCHING, truth) == 0.0


def test_a_sandbox_that_fails_is_no_score() -> None:
    broken = SandboxConfig(backend="command", command=["/bin/sh", "-c", "exit 125"])
    grade = ProgramTests(process_sandbox(broken), limits_of(broken), 60.0)
    with pytest.raises(SandboxUnavailableError):
        grade("print(1)", DOUBLES)
    no_python = ProgramTests(
        process_sandbox(SandboxConfig(backend="command", command=["/bin/false"])),
        limits_of(broken),
        60.0,
    )
    with pytest.raises(SandboxUnavailableError, match="did not start the tests"):
        no_python("print(1)", DOUBLES)


RULES_ONLY, POOL = CustomRewardFunctionConfig(), ScorerPoolConfig(num_workers=1, timeout_s=300.0)


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
async def test_the_pool_grades_programs_of_verls_sources_in_the_configured_sandbox(
    source: str,
) -> None:
    sandboxes = (OWN_COMMAND, SandboxFusionConfig())
    async with running_scorer_pool(POOL, RULES_ONLY, sandboxes=sandboxes) as pool:
        right = ScorerInput(source, "print(2 * int(input()))", DOUBLES)
        no_tests = ScorerInput(source, "print(2 * int(input()))", "4")
        outcomes = await pool.score([right, no_tests])
    assert outcomes[0] == Scored(1.0, 1.0, {"acc": 1.0})
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].kind is FailureKind.UNSCORABLE


async def test_a_pool_with_a_sandbox_that_does_not_work_does_not_start() -> None:
    sandboxes = (SandboxConfig(), SandboxFusionConfig(url="http://127.0.0.1:1/run_code"))
    pool = scorer_pool(POOL, RULES_ONLY, sandboxes=sandboxes)
    with pytest.raises(ConfigError, match="run_code"):
        await pool.start()
    await pool.stop()
