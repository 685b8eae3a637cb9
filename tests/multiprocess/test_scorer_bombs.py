"""A scorer that explodes is killed with all it started, and its CPU is free again within 2 s.

Each bomb notes the pids of its processes, which are then looked up one by one: where they went (a
session of their own, another parent) makes no difference.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.reward.grading import containment
from services.reward.grading.containment import ProcessKey, cpu_by_mark
from services.reward.grading.scorer_worker import ScorerWorker
from sluice.config.schema.reward import CustomRewardFunctionConfig, ScorerPoolConfig
from sluice.data.scoring import ScorerInput
from sluice.types import Failed, FailureKind, Scored
from tests.support.scorer_pools import hurry, running_scorer_pool
from tests.support.small_run import is_running

# On an idle machine it is under 2 s; a busy one has to schedule every thread once to end it.
RECLAIMED_WITHIN_S = 300.0
BOMBS = """
import os, signal, subprocess, sys, threading, time

def noted():
    with open(__file__ + ".pids", "a") as file:
        file.write(f"{os.getpid()}\\n")

def spin():
    noted()
    while True:
        pass

def wait():
    noted()
    time.sleep(1000)

def child(work):
    if os.fork() == 0:
        try:
            work()
        finally:
            os._exit(1)

def forks():
    for _ in range(5):
        os.fork()  # all copies fork on: 32 processes
    spin()

def sessions():
    def leave():
        os.setsid()
        wait()
    for _ in range(4):
        child(leave)
    wait()

def orphans():
    def leave_twice():
        os.setsid()
        child(wait)
        os._exit(0)
    for _ in range(4):
        child(leave_twice)
    wait()

def orphans_of_a_scorer_that_ends():
    heard, tell = os.pipe()
    def leave():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        noted()
        os.write(tell, b".")
        while True:
            pass
    for _ in range(4):
        child(leave)
    for _ in range(4):
        os.read(heard, 1)
    os._exit(3)

def programs():
    for _ in range(4):
        code = "import os\\nopen(%r, 'a').write(str(os.getpid()) + chr(10))\\nwhile True: pass"
        code = code % (__file__ + ".pids")
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    spin()

def memory_of_many():
    def hold():
        noted()
        held = []
        while True:
            held.append(bytearray(2**20))
            time.sleep(0.01)
    for _ in range(4):
        child(hold)
    wait()

def start_spinning_threads():
    # Small stacks and few: all of them fit into the process's address space.
    threading.stack_size(2**18)
    for _ in range(4):
        threading.Thread(target=spin, daemon=True).start()

def threads():
    start_spinning_threads()
    spin()

def threads_left_behind():
    noted()
    start_spinning_threads()
    return 1.0

def threads_left_behind_by_an_error():
    threads_left_behind()
    raise RuntimeError("can't start new thread")

def sessions_left_behind():
    def leave():
        os.setsid()
        spin()
    noted()
    for _ in range(2):
        child(leave)
    return 1.0

def works_with_a_helper():
    def sleep():
        noted()
        time.sleep(1000)
    noted()
    child(sleep)
    since = time.process_time()
    while time.process_time() < since + 0.9:
        pass
    return 1.0

def files():
    noted()
    held = []
    while True:
        try:
            held.append(open(__file__))
        except OSError:
            time.sleep(0.01)

def ignores_everything():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    sessions()

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return globals()[solution_str]() if solution_str in globals() else 1.0
"""
# No busy machine reaches this limit; a bomb gets a shorter one once it has begun.
LIMITS = ScorerPoolConfig(num_workers=1, timeout_s=300.0, memory_mb=600)
HANGS = (
    *("forks", "orphans", "programs", "memory_of_many"),
    *("threads", "files", "ignores_everything"),
)
LEAVES_BEHIND = {
    "threads_left_behind": 1.0,
    "threads_left_behind_by_an_error": FailureKind.UNSCORABLE,
    "sessions_left_behind": 1.0,
}


@pytest.fixture
def bombs(tmp_path: Path) -> CustomRewardFunctionConfig:
    path = tmp_path / "bombs.py"
    path.write_text(BOMBS)
    return CustomRewardFunctionConfig(path=str(path))


def items(*responses: str) -> list[ScorerInput]:
    return [ScorerInput("mine", response, "A") for response in responses]


def reported(outcomes: tuple[Scored | Failed, ...]) -> list[object]:
    return [o.kind if isinstance(o, Failed) else o.score for o in outcomes]


def pids_of(bombs: CustomRewardFunctionConfig) -> list[int]:
    return [int(line) for line in Path(f"{bombs.path}.pids").read_text().split()]


async def until_reclaimed(bombs: CustomRewardFunctionConfig) -> None:
    """No process of a bomb is left."""
    async with asyncio.timeout(RECLAIMED_WITHIN_S):
        while any(map(is_running, pids_of(bombs))):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("bomb", HANGS)
async def test_a_bomb_is_killed_with_all_it_started_and_costs_its_own_sample(
    bombs: CustomRewardFunctionConfig, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, bomb, began=Path(f"{bombs.path}.pids").exists)
    async with running_scorer_pool(LIMITS, bombs) as pool:
        outcomes = reported(await pool.score(items("a", bomb, "b")))
        await until_reclaimed(bombs)
        assert outcomes == [1.0, FailureKind.SCORER_TIMEOUT, 1.0]
        assert reported(await pool.score(items("c"))) == [1.0]
    assert pids_of(bombs)


async def test_what_a_scorer_left_in_other_sessions_ends_when_the_scorer_does(
    bombs: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, bombs) as pool:
        outcomes = reported(await pool.score(items("orphans_of_a_scorer_that_ends")))
        await until_reclaimed(bombs)
    assert outcomes == [FailureKind.SCORER_CRASH]
    assert len(pids_of(bombs)) == 4


@pytest.mark.parametrize("bomb", LEAVES_BEHIND)
async def test_what_spins_on_after_an_answer_is_ended_and_others_are_scored_meanwhile(
    bombs: CustomRewardFunctionConfig,
    bomb: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containment, "LOOK_INTERVAL_S", 0.2)
    limits = ScorerPoolConfig(num_workers=2, timeout_s=300.0, memory_mb=600)
    async with running_scorer_pool(limits, bombs) as pool:
        async with asyncio.TaskGroup() as tasks:
            exploding = tasks.create_task(pool.score(items(bomb)))
            other = tasks.create_task(pool.score(items("a")))
        assert [reported(exploding.result()), reported(other.result())] == [
            [LEAVES_BEHIND[bomb]],
            [1.0],
        ]
        assert reported(await pool.score(items("b"))) == [1.0]
        await until_reclaimed(bombs)
        assert reported(await pool.score(items("c", "d"))) == [1.0, 1.0]
        assert (pool.num_ended_idle, pool.num_replaced) == (1, 1)
    assert "data_source 'mine'" in caplog.text


async def test_cpu_of_a_busy_scorer_and_a_helper_that_sleeps_are_borne(
    bombs: CustomRewardFunctionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containment, "LOOK_INTERVAL_S", 0.1)
    limits = ScorerPoolConfig(num_workers=1, timeout_s=300.0, memory_mb=600)
    looks = watched_looks(monkeypatch)
    async with running_scorer_pool(limits, bombs) as pool:
        assert reported(await pool.score(items("works_with_a_helper"))) == [1.0]
        async with asyncio.timeout(RECLAIMED_WITHIN_S):
            while [num for num in looks if num == 2][3:] == []:
                await asyncio.sleep(0.01)
        assert pool.num_replaced == 0
    assert not any(map(is_running, pids_of(bombs)))


def watched_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that each look sees, look by look."""
    seen: list[int] = []

    def look(marks: set[str]) -> dict[str, dict[ProcessKey, float]]:
        found = cpu_by_mark(marks)
        seen.append(sum(map(len, found.values())))
        return found

    monkeypatch.setattr(containment, "cpu_by_mark", look)
    return seen


async def test_a_request_that_comes_while_an_idle_process_is_ended_gets_another(
    bombs: CustomRewardFunctionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_kill, asked = ScorerWorker.kill, asyncio.Event()

    def kill(worker: ScorerWorker) -> None:
        really_kill(worker)
        asked.set()

    monkeypatch.setattr(ScorerWorker, "kill", kill)
    monkeypatch.setattr(containment, "LOOK_INTERVAL_S", 0.2)
    limits = ScorerPoolConfig(num_workers=1, timeout_s=300.0, memory_mb=600)
    async with running_scorer_pool(limits, bombs) as pool:
        assert reported(await pool.score(items("threads_left_behind"))) == [1.0]
        async with asyncio.timeout(RECLAIMED_WITHIN_S):
            await asked.wait()
        assert reported(await pool.score(items("a"))) == [1.0]
        assert (pool.num_ended_idle, pool.num_replaced) == (1, 1)
