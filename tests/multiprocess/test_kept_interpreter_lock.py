"""A call that keeps the interpreter's lock stops every thread of Python's; the process ends yet.

Real processes, for the rule is about what the kernel does to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sluice.concurrency.watchdog import CpuDeadline

TIMEOUT_S, LIMIT_S = 400.0, 0.25
REPOSITORY = Path(__file__).resolve().parents[2]
WATCHED = """
import asyncio, os, re, signal, sys, time
from sluice.concurrency import watchdog
from sluice.concurrency.watchdog import CpuDeadline, StallJudge, WorkState, watch_service
from sluice.config.schema.service import ServiceConfig, WatchdogConfig

class PatientJudge(StallJudge):
    # Gives nothing up: only the kernel does. A busy machine may keep a thread from running.
    num_looks = 0

    def __init__(self, stall_s, give_up_s, interval_s):
        super().__init__(None, None, interval_s)

    def check(self, now_s):
        PatientJudge.num_looks += 1
        return super().check(now_s)

watchdog.StallJudge = PatientJudge
LIMIT_S = CpuDeadline(float(sys.argv[3])).cpu_s

def backtrack():
    re.match(r"(a+)+$", "a" * 60 + "b")

def work(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        sum(range(1000))

def work_in_short_calls():
    for number in range(8):
        looks_until = PatientJudge.num_looks + 2
        work(LIMIT_S / 4)
        if number == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        while PatientJudge.num_looks < looks_until:
            time.sleep(0.01)

async def main():
    moved = iter(range(10**9))
    limits = WatchdogConfig(stall_s=None, give_up_s=float(sys.argv[3]))
    service = ServiceConfig(run_dir=sys.argv[1], watchdog=limits)
    with watch_service("reward", service, lambda: WorkState(next(moved))):
        await asyncio.sleep(0.3)
        await asyncio.to_thread(globals()[sys.argv[2]])
    work(2.0 * LIMIT_S)  # and nothing is left that would end it

asyncio.run(main())
print("done", flush=True)
"""


def start(run_dir: Path, work: str, give_up_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(run_dir), work, str(give_up_s)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_call_that_keeps_the_lock_ends_the_process_with_its_stacks(tmp_path: Path) -> None:
    process = start(tmp_path, "backtrack", LIMIT_S)
    try:
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGPROF
    assert "in backtrack" in (tmp_path / "logs" / "reward.stacks.txt").read_text(encoding="utf-8")


def test_a_process_that_was_stopped_for_longer_than_the_limit_continues(tmp_path: Path) -> None:
    process = start(tmp_path, "work_in_short_calls", LIMIT_S)
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(3.0 * CpuDeadline(LIMIT_S).cpu_s)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "done\n")


def test_a_timer_that_somebody_else_uses_is_left_alone(tmp_path: Path) -> None:
    signal.setitimer(signal.ITIMER_PROF, 1000.0)
    try:
        deadline = CpuDeadline(5.0, tmp_path / "stacks.txt")
        deadline.start()
        deadline.restart()
        deadline.stop()
        assert signal.getitimer(signal.ITIMER_PROF)[0] == pytest.approx(1000.0, abs=50.0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
