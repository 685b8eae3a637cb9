"""Programs that work on leased samples: their tasks, their rewards, and how they end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from services.reward.episodes.leases import LeaseManager
from services.reward.ledger.leases import PostedEnd
from sluice.client.agent_program import (
    AgentFailedError,
    AgentProgram,
    printed_reward,
    program_of,
)
from sluice.client.agents import AgentRunner
from sluice.client.leases import LeasedSample
from sluice.errors import (
    AccessDeniedError,
    ConfigError,
    ExhaustedError,
    InvalidRequestError,
    LeaseEndedError,
    NotFoundError,
    NotReadyError,
    PeerError,
    leaves,
)
from sluice.rpc.policy import CALL_POLICIES
from sluice.types import Failed, FailureKind, RolloutGroup, Scored
from tests.support.leased import Leased, leased
from tests.support.scripted_environment import eventually, group_request

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

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
    "hang": "open(__file__ + '.hangs', 'w'); import subprocess; subprocess.run(['sleep', '1000'])",
    "flood": "print('x' * (1 << 20), file=sys.stderr); print('y' * (1 << 20)); "
    'print(json.dumps({"reward": 0.5}))',
    "fail with half a character": r"""print('{"failure": "\\ud800"}')""",
    "print a long reward": r"""print(json.dumps({"reward": "\u200b" * 4000}))""",
    "leave a child": "import subprocess; subprocess.Popen(['sleep', '1000']); "
    'print(json.dumps({"reward": 0.5}))',
    "refuse to end": "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\n"
    "while True: time.sleep(1)",
}


@pytest.fixture(autouse=True)
def _last_calls_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.client.agents._LAST_CALL_S", 60.0)


async def never_ends() -> bool:
    return False


def answers(_prompt: str) -> str:
    return "Hello."


def runner_of(
    run: Leased, folder: Path, end: str, say: Callable[[str], None] = print, **given: Any
) -> AgentRunner:
    source = folder / "agent.py"
    source.write_text(AGENT + ENDS[end])
    command = shlex.join([sys.executable, str(source)])
    leases, has_ended = given.get("leases", run.client.leases()), given.get("has_ended", never_ends)
    return AgentRunner(leases, command, 2, run.base_url, say, has_ended)


async def played(run: Leased, folder: Path, end: str, n: int = 3) -> tuple[RolloutGroup, str]:
    said: list[str] = []
    runner = runner_of(run, folder, end, said.append)
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(runner.run())
        group = await run.generator.generate(group_request(n))
        await eventually(lambda: not runner.counts.running)
        working.cancel()
    return group, "\n".join(said)


@pytest.mark.parametrize("end", ["reward", "flood", "leave a child"])
async def test_each_sample_gets_the_reward_that_its_program_prints_last(
    tmp_path: Path, end: str
) -> None:
    async with leased(tmp_path, answers) as run:
        group, _ = await played(run, tmp_path, end)
    assert [rollout.outcome for rollout in group.rollouts] == [Scored(0.5, 0.5, {"acc": 0.5})] * 3


@pytest.mark.parametrize(
    ("end", "detail"),
    [("fail", "exit code 1: out of luck"), ("hang", "episode_timeout_s=600")],
)
async def test_a_program_that_fails_or_hangs_leaves_no_reward(
    tmp_path: Path, end: str, detail: str, skip_time: Callable[[float], None]
) -> None:
    async def let_its_time_pass() -> None:
        await eventually((tmp_path / "agent.py.hangs").exists)
        skip_time(600.0)

    async with leased(tmp_path, answers, timeout_s=600.0) as run, asyncio.TaskGroup() as tasks:
        if end == "hang":
            tasks.create_task(let_its_time_pass())
        group, _ = await played(run, tmp_path, end, n=1)
    failed = group.rollouts[0].outcome
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.AGENT
    assert detail in failed.detail


@pytest.mark.parametrize(
    ("end", "detail"),
    [("fail with half a character", "?"), ("print a long reward", r"reward: '\u200b")],
)
async def test_what_cannot_be_sent_of_a_failure_fails_one_sample_and_not_the_command(
    tmp_path: Path, end: str, detail: str
) -> None:
    async with leased(tmp_path, answers) as run:
        group, _ = await played(run, tmp_path, end, n=1)
    failed = group.rollouts[0].outcome
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.AGENT
    assert detail in failed.detail


AWAY = PeerError("reward", "a call", "it is away")


class Scripted:
    """Leases of one sample; an end raises what comes next of `errors`, at last always the same."""

    def __init__(self, *errors: Exception | None, is_away: bool = False) -> None:
        self.errors, self.is_away = list(errors), is_away
        self.num_taken, self.ends = 0, list[Any]()

    async def take(self, *_given: Any) -> list[LeasedSample]:
        """Lease it once, and then be away, or have none."""
        self.num_taken += 1
        if self.num_taken == 1:
            return [LeasedSample("one", "p", 0, (), "{}", 300.0)]
        if self.is_away:
            raise AWAY
        await asyncio.sleep(0.01)
        return []

    async def end(self, lease_id: str, **end: Any) -> None:
        """Note an end."""
        self.ends.append(end)
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error


def scripted(leases: Scripted, output: str) -> AgentRunner:
    """A command whose programs print `output`."""
    command = shlex.join(["echo", output])
    return AgentRunner(cast("Any", leases), command, 2, "http://x", print, never_ends, 0.0)


@pytest.mark.parametrize(
    ("output", "error", "counts"),
    [
        ('{"failure": "x"}', InvalidRequestError("x"), "0 ended, 0 failed, 1 stopped"),
        ('{"failure": "x"}', AccessDeniedError("x"), "0 ended, 0 failed, 1 stopped"),
        ('{"reward": 1.0}', NotFoundError("x"), "0 ended, 0 failed, 1 stopped"),
        ('{"reward": 1.0}', LeaseEndedError("x"), "1 ended, 0 failed"),
        ('{"reward": 1.0}', None, "1 ended, 0 failed; mean reward 1.000"),
    ],
)
async def test_an_end_that_the_run_refuses_counts_neither_as_ended_nor_its_reward(
    output: str, error: Exception | None, counts: str
) -> None:
    leases = Scripted(error)
    runner = scripted(leases, output)
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(runner.run())
        await eventually(lambda: leases.ends and not runner.counts.running)
        working.cancel()
    assert str(runner.counts) == f"0 agents run, {counts}"


async def test_a_command_posts_the_ends_of_its_programs_before_it_gives_up_an_absent_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.client.agents._PAUSE_S", 0.01)
    leases = Scripted(*[AWAY] * 20, ExhaustedError("full"), None, is_away=True)
    runner = scripted(leases, '{"reward": 1.0}')
    with pytest.raises(ExceptionGroup) as caught:
        await runner.run()
    (error,) = leaves(caught.value)
    assert isinstance(error, NotReadyError)
    assert "the run has not ended; start this command again" in str(error)
    assert "1 ended, 0 failed; mean reward 1.000" in str(error)
    assert leases.ends == [{"reward_value": 1.0, "failure": ""}] * 22


@pytest.mark.parametrize("end", ["hang", "refuse to end"])
async def test_stopping_ends_the_programs_and_their_samples(tmp_path: Path, end: str) -> None:
    async with leased(tmp_path, answers) as run, asyncio.TaskGroup() as tasks:
        runner = runner_of(run, tmp_path, end)
        working = tasks.create_task(runner.run())
        group = tasks.create_task(run.generator.generate(group_request(1)))
        async with asyncio.timeout(60):
            while not run.engine.prompts:
                await asyncio.sleep(0.01)
        working.cancel()
        failed = (await group).rollouts[0].outcome
    assert isinstance(failed, Failed)
    assert "sluice agents run was stopped" in failed.detail
    assert (runner.counts.running, runner.counts.stopped) == (0, 1)


async def test_the_end_of_the_run_stops_programs_and_returns(tmp_path: Path) -> None:
    async def has_ended() -> bool:
        return bool(run.engine.prompts)

    class Away:
        async def take(self, *given: Any) -> Any:
            if run.engine.prompts:
                raise PeerError("reward", "leasing samples", "it is away")
            return await run.client.leases().take(*given)

    said: list[str] = []
    async with leased(tmp_path, answers) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(run.generator.generate(group_request(1)))
        await runner_of(
            run, tmp_path, "hang", said.append, leases=Away(), has_ended=has_ended
        ).run()
        group.cancel()
    assert any("for the reward service" in line for line in said)


async def test_a_runner_shows_life_while_all_of_its_programs_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.client.agents._KEEP_ALIVE_S", 30.0)
    monkeypatch.setattr("sluice.client.agents._SIGNS", 300)
    shown = asyncio.Event()

    class Counted:
        async def take(self, count: int, wait_s: float, keep_alive_s: float) -> Any:
            assert keep_alive_s == 30.0
            if count == 0:
                shown.set()
            return await leases.take(count, wait_s, keep_alive_s)

        end = property(lambda _self: leases.end)

    async with leased(tmp_path, answers) as run, asyncio.TaskGroup() as tasks:
        leases = run.client.leases()
        working = tasks.create_task(runner_of(run, tmp_path, "hang", leases=Counted()).run())
        group = tasks.create_task(run.generator.generate(group_request(2)))
        async with asyncio.timeout(60):
            while len(run.engine.prompts) < 2:
                await asyncio.sleep(0.01)
            shown.clear()
            await shown.wait()
        working.cancel()
        group.cancel()


async def test_an_end_is_posted_again_when_the_reward_service_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[PostedEnd] = []

    def late(self: LeaseManager, lease_id: str, end: PostedEnd) -> None:
        ends.append(end)
        if len(ends) <= CALL_POLICIES["RewardService/EndEpisode"].attempts:
            raise NotReadyError("it restarts")
        now(self, lease_id, end)

    now = LeaseManager.end
    monkeypatch.setattr(LeaseManager, "end", late)
    async with leased(tmp_path, answers) as run, asyncio.TaskGroup() as tasks:
        working = tasks.create_task(runner_of(run, tmp_path, "reward").run())
        group = await run.generator.generate(group_request(1))
        working.cancel()
    assert group.rollouts[0].outcome == Scored(0.5, 0.5, {"acc": 0.5})
    assert set(ends) == {PostedEnd(0.5)}


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_nothing_of_a_program_s_group_is_left_though_sigterm_ends_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    grace_s = 600.0 if is_cancelled else 0.05
    monkeypatch.setattr("sluice.client.agent_program._GRACE_S", grace_s)
    note = tmp_path / "child"
    script = f"trap '' TERM; sleep 1000 & echo $! > {note}; wait"
    program = await AgentProgram.start(["bash", "-c", script], {})
    async with asyncio.timeout(60):
        while not note.exists() or not note.read_text():
            await asyncio.sleep(0.01)
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(program.stop())
            await asyncio.sleep(0)  # it waits
            if is_cancelled:
                stopping.cancel()
        assert stopping.cancelled() == is_cancelled
        while Path(f"/proc/{int(note.read_text())}/cmdline").exists():
            await asyncio.sleep(0.01)


async def test_a_program_that_the_system_does_not_end_holds_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.client.agent_program._GRACE_S", 0.05)
    monkeypatch.setattr("sluice.client.agent_program._KILLED_S", 0.05, raising=False)
    program = await AgentProgram.start(["sleep", "1000"], {})
    monkeypatch.setattr("sluice.client.agent_program.os.killpg", lambda *_: None)
    async with asyncio.timeout(60):
        await program.stop()
    with pytest.raises(AgentFailedError, match="exit code -9"):  # Python's own kill
        await program.result(b"", 60.0)


async def test_a_program_that_ends_before_its_task_is_read_has_ended() -> None:
    script = "exec 3<&0; sleep 1000 <&3 >/dev/null 2>&1 & exit 0"  # the pipe stays open
    program = await AgentProgram.start(["bash", "-c", script], {})
    assert await program.result(b"x" * (1 << 20), 60.0) is None
    await program.stop()


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("", None),
        ("done", None),
        ('{"reward": 1}\nmore', None),
        ('log\n{"reward": 0.5}\n\n', 0.5),
        ("[1]", None),
        ('{"reward": null}', None),
        ('5 %\r100 %\r{"reward": 0.5}\r\n', 0.5),
        ('{"reward": 0.5, "answer": "one\u2028two"}\n', 0.5),  # as JSON.stringify writes it
    ],
)
def test_only_the_last_line_holds_the_reward(output: str, reward: float | None) -> None:
    assert printed_reward(output) == reward


@pytest.mark.parametrize(
    "line",
    [
        '{"reward": "1"}',
        '{"reward": NaN}',
        '{"reward": Infinity}',
        '{"reward": 1' + "0" * 400 + "}",
        '{"reward": 1e39}',
        '{"reward": true}',
        '{"failure": "lost"}',
        '{"failure": ""}',
    ],
)
def test_what_is_no_reward_is_a_failure(line: str) -> None:
    with pytest.raises(AgentFailedError):
        printed_reward(line)


def test_a_program_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such program"):
        program_of("no-such-agent --x")


async def test_a_program_that_always_fails_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    async with leased(tmp_path, answers) as run, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(run.generator.generate(group_request(16)))
        with pytest.raises(ExceptionGroup) as caught:
            await runner_of(run, tmp_path, "fail").run()
        group.cancel()
    (error,) = leaves(caught.value)
    assert isinstance(error, ConfigError)
    assert "16 agents in a row failed, the last: exit code 1: out of luck" in str(error)
