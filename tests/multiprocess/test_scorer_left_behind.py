"""What a scorer started ends with its service, or with the next service of the run.

Processes hold a lock of a file that every fork of theirs shares: it is free when none is left,
whatever their ids were.
"""

from __future__ import annotations

import asyncio
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.config.schema.reward import CustomRewardFunctionConfig, ScorerPoolConfig
from sluice.data.scoring import ScorerInput
from sluice.types import Failed, FailureKind
from tests.support.scorer_pools import hurry, running_scorer_pool
from tests.support.small_run import is_running

ENDS_WITHIN_S = 300.0
NUM_CHAINS = 4  # one of them may be caught by luck
REPOSITORY = Path(__file__).resolve().parents[2]
LIMITS = ScorerPoolConfig(num_workers=1, timeout_s=300.0, memory_mb=600)
FUNCTIONS = """
import fcntl, os, time

def hold():
    file = os.open(__file__ + ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)

def leaves():
    hold()
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    return 1.0

def hops():
    hold()
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
    time.sleep(1000)

def environment():
    return {"score": 1.0, "pred": " ".join(sorted(os.environ))}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return globals()[solution_str]() if solution_str in globals() else 1.0
"""
SERVICE = """
import asyncio, sys
from pathlib import Path
from sluice.data.scoring import ScorerInput
from services.reward.grading.pool import running_scorer_pool
from sluice.config.schema.reward import (
    CustomRewardFunctionConfig, RewardConfig, ScorerPoolConfig
)
from sluice.config.schema.service import SandboxConfig

async def main():
    custom = CustomRewardFunctionConfig(path=sys.argv[1])
    limits = ScorerPoolConfig(num_workers=1, timeout_s=300.0)
    reward = RewardConfig(custom_reward_function=custom, scorer_pool=limits)
    async with running_scorer_pool(reward, SandboxConfig(), Path(sys.argv[2])) as pool:
        await pool.score([ScorerInput("mine", "leaves", "A")])
        print("left", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def custom(tmp_path: Path) -> CustomRewardFunctionConfig:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return CustomRewardFunctionConfig(path=str(path))


def somebody_is_left(custom: CustomRewardFunctionConfig) -> bool:
    lock = Path(f"{custom.path}.lock")
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def until_none_is_left(custom: CustomRewardFunctionConfig) -> None:
    async with asyncio.timeout(ENDS_WITHIN_S):
        while somebody_is_left(custom):
            await asyncio.sleep(0.01)


def service(custom: CustomRewardFunctionConfig, run_dir: Path) -> subprocess.Popen[str]:
    """A process with a pool, whose scorer has started something."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(custom.path), str(run_dir)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "left\n"
    return process


async def test_the_next_service_of_a_run_ends_what_a_killed_one_left_behind(
    custom: CustomRewardFunctionConfig, tmp_path: Path
) -> None:
    with service(custom, tmp_path / "run") as killed:
        killed.kill()
        while is_running(killed.pid):  # a zombie, whom nobody has waited for, has ended too
            await asyncio.sleep(0.01)
        async with running_scorer_pool(LIMITS, custom, run_dir=tmp_path / "other"):
            assert somebody_is_left(custom)
        async with running_scorer_pool(LIMITS, custom, run_dir=tmp_path / "run"):
            await until_none_is_left(custom)


async def test_the_scorers_of_a_service_that_still_runs_are_left_alone(
    custom: CustomRewardFunctionConfig, tmp_path: Path
) -> None:
    with service(custom, tmp_path) as running:
        try:
            async with running_scorer_pool(LIMITS, custom, run_dir=tmp_path):
                assert somebody_is_left(custom)
            assert somebody_is_left(custom)
        finally:
            running.kill()
    async with running_scorer_pool(LIMITS, custom, run_dir=tmp_path):
        await until_none_is_left(custom)


async def test_a_process_that_replaces_itself_again_and_again_is_caught(
    custom: CustomRewardFunctionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, "hops", began=lambda: somebody_is_left(custom))
    async with running_scorer_pool(LIMITS, custom) as pool:
        for _ in range(NUM_CHAINS):
            (outcome,) = await pool.score([ScorerInput("mine", "hops", "A")])
            await until_none_is_left(custom)
            assert isinstance(outcome, Failed)
            assert outcome.kind is FailureKind.SCORER_TIMEOUT


async def test_a_scorer_has_no_key_to_the_services(
    custom: CustomRewardFunctionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"SLUICE_TOKEN", "SLUICE_TOKEN_FILE", "SLUICE_KEY_FILE", "SLUICE_CERT_FILE"}
    for name in (*secrets, "SLUICE_OF_NO_SECRET"):
        monkeypatch.setenv(name, "x")
    async with running_scorer_pool(LIMITS, custom) as pool:
        (outcome,) = await pool.score([ScorerInput("mine", "environment", "A")])
    assert not isinstance(outcome, Failed)
    seen = set((outcome.prediction or "").split())
    assert not seen & secrets
    assert {"SLUICE_OF_NO_SECRET", "SLUICE_SCORER_MARK"} <= seen
