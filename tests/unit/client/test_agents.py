"""Programs that work on leased samples: their tasks, their rewards, and how they end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import pytest

from sluice.client.agents import AgentFailedError, AgentRunner, printed_reward
from sluice.errors import ConfigError
from sluice.types import Failed, FailureKind, RolloutGroup, Scored
from tests.support.leased import Leased, leased
from tests.support.scripted_environment import group_request

AGENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urllib.request.urlopen(request))
print("said", answer["choices"][0]["message"]["content"])
"""
ENDS = {
    "reward": 'print(json.dumps({"reward": float(task["ground_truth"]) / 2}))',
    "fail": 'sys.exit("out of luck")',
    "hang": "import subprocess; subprocess.run(['sleep', '1000'])",
}


def answers(_prompt: str) -> str:
    return "Hello."


async def played(run: Leased, folder: Path, end: str, n: int = 3) -> tuple[RolloutGroup, str]:
    source = folder / "agent.py"
    source.write_text(AGENT + ENDS[end])
    command = shlex.join([sys.executable, str(source)])
    said: list[str] = []
    runner = AgentRunner(run.client.leases(), command, 2, run.base_url, said.append)
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(runner.run())
        group = await run.generator.generate(group_request(n))
        working.cancel()
    assert runner.counts.running == 0
    return group, "\n".join(said)


async def test_each_sample_gets_the_reward_that_its_program_prints_last(tmp_path: Path) -> None:
    async with leased(tmp_path, answers) as run:
        group, _ = await played(run, tmp_path, "reward")
    assert [rollout.outcome for rollout in group.rollouts] == [Scored(0.5, 0.5, {"acc": 0.5})] * 3


@pytest.mark.parametrize(
    ("end", "detail"),
    [("fail", "exit code 1: out of luck"), ("hang", "episode_timeout_s=4")],
)
async def test_a_program_that_fails_or_hangs_leaves_no_reward(
    tmp_path: Path, end: str, detail: str
) -> None:
    async with leased(tmp_path, answers, timeout_s=4.0) as run:
        group, _ = await played(run, tmp_path, end, n=1)
    failed = group.rollouts[0].outcome
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.AGENT
    assert detail in failed.detail


async def test_stopping_ends_the_programs_and_their_samples(tmp_path: Path) -> None:
    async with leased(tmp_path, answers) as run, asyncio.TaskGroup() as tasks:
        source = tmp_path / "agent.py"
        source.write_text(AGENT + ENDS["hang"])
        command = shlex.join([sys.executable, str(source)])
        runner = AgentRunner(run.client.leases(), command, 1, run.base_url, lambda _: None)
        working = tasks.create_task(runner.run())
        group = tasks.create_task(run.generator.generate(group_request(1)))
        async with asyncio.timeout(30):
            while not run.engine.prompts:
                await asyncio.sleep(0.01)
        working.cancel()
        failed = (await group).rollouts[0].outcome
    assert isinstance(failed, Failed)
    assert "sluice agents run was stopped" in failed.detail


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("", None),
        ("done", None),
        ('{"reward": 1}\nmore', None),
        ('log\n{"reward": 0.5}\n\n', 0.5),
        ("[1]", None),
        ('{"reward": null}', None),
    ],
)
def test_only_the_last_line_holds_the_reward(output: str, reward: float | None) -> None:
    assert printed_reward(output) == reward


@pytest.mark.parametrize(
    "line", ['{"reward": "1"}', '{"reward": NaN}', '{"reward": true}', '{"failure": "lost"}']
)
def test_what_is_no_reward_is_a_failure(line: str) -> None:
    with pytest.raises(AgentFailedError):
        printed_reward(line)


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such program"):
        AgentRunner(None, "no-such-agent --x", 1, "", print)  # type: ignore[arg-type]
