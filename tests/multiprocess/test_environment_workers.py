"""Worker processes contain what an environment does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from services.reward.episodes.client import ServedEnvironments
from services.reward.episodes.drivers import EpisodeFailedError
from services.reward.episodes.workers import EnvironmentWorkers
from sluice.errors import ConfigError
from sluice.types import Answer, FinishReason
from tests.support.environments import CALCULATOR, author_file, calls, episode, worked
from tests.support.small_run import is_running

STOP = FinishReason.STOP
WAIT_S, LITTLE_S = 240.0, 2.0
WORLD = """
import os, pathlib, subprocess, threading, time
import sluice

def begins():
    pathlib.Path(__file__).with_name("begun").touch()

class World:
    def reset(self, ground_truth):
        self.own = {"pid": os.getpid(), "kept": []}

    def keep(self, text: str) -> str:
        '''Keep a text.'''
        self.own["kept"].append(text)
        return ",".join(self.own["kept"])

    def pid(self) -> int:
        '''Return the process.'''
        return os.getpid()

    def child(self) -> int:
        '''Start a process.'''
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def hang(self) -> str:
        '''Hang.'''
        begins()
        time.sleep(1000)

    async def block(self) -> str:
        '''Block the event loop.'''
        begins()
        time.sleep(1000)

    async def wait(self) -> str:
        '''Wait for what never comes.'''
        await __import__("asyncio").sleep(1000)

    def large(self) -> str:
        '''Return 1 GB.'''
        return "x" * 10**9

    def fill(self) -> str:
        '''Use all memory, after the call was given up.'''
        begins()
        time.sleep(2.5)
        while True:
            self.own["kept"].append(bytes(10**7))

    def leave(self) -> str:
        '''End the process.'''
        os._exit(3)

    def variables(self) -> str:
        '''Return names of secrets.'''
        return ",".join(name for name in os.environ if name.startswith("SLUICE_TOKEN"))
"""


@contextmanager
def little_time(servers: ServedEnvironments, *workers: EnvironmentWorkers) -> Iterator[None]:
    """Let calls be given up soon in the block; on a busy machine others take long."""

    def limit(seconds: float) -> None:
        servers.batches._timeout_s = seconds
        for each in workers:
            each._call_timeout_s = seconds
            for slot in each._slots:
                if slot.worker is not None:
                    slot.worker.probe._deadline_s = seconds

    before_s = servers.batches._timeout_s
    limit(LITTLE_S)
    try:
        yield
    finally:
        limit(before_s)


async def replaced(workers: object, number: int) -> None:
    """Wait until so many were, and one is up."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                workers.address_for("x")  # type: ignore[attr-defined]
            except EpisodeFailedError:
                pass
            else:
                if workers.num_replaced >= number:  # type: ignore[attr-defined]
                    return
            await asyncio.sleep(0.05)


async def said(played: object, turn: int, name: str, **given: object) -> str:
    """What a tool says."""
    seen = await played.step(turn, calls((name, given)), STOP)  # type: ignore[attr-defined]
    return seen.messages[0].content


@pytest.mark.parametrize("how", ["hang", "block", "fill", "leave"])
async def test_a_worker_that_hangs_or_dies_is_replaced_with_all_it_started(
    tmp_path: Path, how: str
) -> None:
    source = author_file(tmp_path, WORLD)
    async with worked(source, memory_limit_mb=2048) as (servers, workers):
        beside = episode(servers)
        await beside.open()
        is_given_up, has_begun = how != "leave", False
        while not has_begun:
            bad = episode(servers)
            await bad.open()
            child = int(await said(bad, 0, "child"))
            with ExitStack() as limits:
                if is_given_up:
                    limits.enter_context(little_time(servers, workers))
                with pytest.raises(EpisodeFailedError):
                    await bad.step(1, calls((how, {})), STOP)
                # A busy machine may not have begun it in this time: then another one does.
                has_begun = not is_given_up or (tmp_path / "begun").exists()
                await bad.abandon()
                if has_begun:
                    await replaced(workers, 1)
        assert not is_running(child)
        with pytest.raises(EpisodeFailedError):
            await said(beside, 0, "keep", text="a")
        after = episode(servers)
        await after.open()
        assert await said(after, 0, "keep", text="b") == "b"


async def test_a_hanging_call_stops_no_other_episode(tmp_path: Path) -> None:
    source = author_file(tmp_path, WORLD)
    async with worked(source, call_timeout_s=WAIT_S) as (servers, workers):
        hanging, waiting, good = episode(servers), episode(servers), episode(servers)
        for one in (hanging, waiting, good):
            await one.open()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(hanging.step(0, calls(("hang", {})), STOP))
            second = tasks.create_task(waiting.step(0, calls(("wait", {})), STOP))
            for turn in range(3):
                assert await said(good, turn, "keep", text="x") == ",".join("x" * (turn + 1))
            assert not first.done()
            first.cancel()
            second.cancel()
        assert workers.num_replaced == 0


async def test_a_coroutine_that_waits_too_long_is_cancelled_and_its_worker_stays(
    tmp_path: Path,
) -> None:
    async with worked(author_file(tmp_path, WORLD)) as (servers, workers):
        played, other = episode(servers), episode(servers)
        await played.open()
        await other.open()
        # The worker may see the deadline first; then the repeated call learns what became of it.
        given_up = pytest.raises(EpisodeFailedError, match=r"within 2 s|call of this .* cut short")
        with little_time(servers), given_up:
            await played.step(0, calls(("wait", {})), STOP)
        await played.abandon()
        assert await said(other, 0, "keep", text="a") == "a"
        (slot,) = workers._slots
        assert slot.worker is not None
        async with asyncio.timeout(WAIT_S):
            while await slot.worker.probe.longest_call_s():
                await asyncio.sleep(0.05)
        assert workers.num_replaced == 0


async def test_a_result_of_a_gigabyte_is_cut_where_it_is_made_and_the_log_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with worked(author_file(tmp_path, WORLD)) as (servers, workers):
        played = episode(servers)
        await played.open()
        text = await said(played, 0, "large")
        assert (1 << 20) <= len(text) < (1 << 20) + 100
        await said(played, 1, "large")
        assert workers.num_replaced == 0
    logged = capfd.readouterr().err
    assert logged.count("World.large returned 1000000000 characters; the policy reads") == 1
    assert "return less" in logged


async def test_episodes_share_nothing_and_see_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_TOKEN", "secret")
    async with worked(author_file(tmp_path, WORLD), workers=2) as (servers, _):
        played = [episode(servers) for _ in range(8)]
        for one in played:
            await one.open()
        pids = {await said(one, 0, "pid") for one in played}
        assert len(pids) == 2
        for index, one in enumerate(played):
            assert await said(one, 1, "keep", text=str(index)) == str(index)
        assert await said(played[0], 2, "variables") == ""
    assert not any(is_running(int(pid)) for pid in pids)


async def test_an_environment_that_cannot_be_loaded_is_reported_at_the_start(
    tmp_path: Path,
) -> None:
    source = author_file(tmp_path, "class World:\n    def look(self, jar): ...\n")
    with pytest.raises(ConfigError, match=r"World\.look"):
        async with worked(source):
            pass


@pytest.mark.parametrize(("kills", "starts"), [(2, True), (9, False)])
async def test_a_worker_that_is_killed_while_it_loads_is_started_again_twice(
    tmp_path: Path, kills: int, *, starts: bool
) -> None:
    seen = tmp_path / "seen"
    source = author_file(
        tmp_path,
        f"import os, signal\nwith open({str(seen)!r}, 'a') as file:\n    file.write('x')\n"
        f"if os.path.getsize({str(seen)!r}) <= {kills}:\n"
        f"    os.kill(os.getpid(), signal.SIGKILL)\n{WORLD}",
    )
    expected = nullcontext() if starts else pytest.raises(ConfigError, match="SIGKILL")
    with expected:
        async with worked(source) as (servers, _):
            await episode(servers).open()
    assert seen.read_text() == "xxx"


async def test_two_environments_keep_apart(tmp_path: Path) -> None:
    first = author_file(tmp_path, CALCULATOR, "first.py")
    second = author_file(tmp_path, CALCULATOR.replace("str(eval(", "'2: ' + str(eval("), "b.py")
    async with worked(first) as (one, _), worked(second) as (two, _):
        texts = []
        for servers in (one, two):
            played = episode(servers)
            await played.open()
            texts.append(await said(played, 0, "calc", expression="1 + 1"))
            assert (await played.step(1, Answer("2"), STOP)).done
        assert texts == ["2", "2: 2"]
