"""The watchdog's thread: what it reports, and how it ends a process. Judged time is made up."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from sluice.concurrency.waits import Waiting
from sluice.concurrency.watchdog import (
    EXIT_STALLED,
    StallJudge,
    StallVerdict,
    Watchdog,
    WorkState,
    no_progress_seconds,
    watch_service,
)
from sluice.config.schema.service import ServiceConfig
from sluice.errors import EngineError

WAITS = (Waiting("rollout-1", "generating", 34.0, 12, "prompt data-3"),)
WAIT_S = 60.0


class Scripted(StallJudge):
    """Finds scripted verdicts, look by look, then nothing any more."""

    def __init__(self, *verdicts: StallVerdict) -> None:
        super().__init__(1.0, 2.0, 0.01)
        self._script = list(verdicts)
        self.is_through = threading.Event()

    def check(self, now_s: float) -> StallVerdict:
        super().check(now_s)
        if not self._script:
            self.is_through.set()
            return StallVerdict.FINE
        return self._script.pop(0)


async def until_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_S)


def dog(judge: StallJudge, ends: list[int], ended: threading.Event, file: Path | None) -> Watchdog:
    def end(code: int) -> None:
        ends.append(code)
        ended.set()

    return Watchdog(
        judge,
        lambda: WorkState(0, waits=WAITS),
        stacks_file=file,
        interval_s=0.01,
        end=end,
    )


async def test_a_stall_is_reported_with_what_is_awaited_and_the_process_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge, ends, ended = Scripted(StallVerdict.STALLED), list[int](), threading.Event()
    file = tmp_path / "logs" / "reward.stacks.txt"

    async def a_group() -> None:
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(a_group(), name="prompt data-3")
        with dog(judge, ends, ended, file).watching():
            await until_set(judge.is_through)
        running.cancel()
    (record,) = [r for r in caplog.records if r.name == "sluice.concurrency.watchdog"]
    assert record.levelno == logging.WARNING
    assert "rollout-1: generating (34 s, 12 times) [prompt data-3]" in record.getMessage()
    stacks = file.read_text(encoding="utf-8")
    assert "  prompt data-3\n" in stacks
    assert "in test_a_stall_is_reported" in stacks
    assert "a_group" in stacks
    assert ends == []


async def test_what_is_hopeless_ends_with_the_exit_code_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends, ended = list[int](), threading.Event()
    with dog(Scripted(StallVerdict.HOPELESS), ends, ended, None).watching():
        await until_set(ended)
    assert ends == [EXIT_STALLED]
    assert f"the process ends with exit code {EXIT_STALLED}" in caplog.text


async def test_a_log_that_hangs_does_not_keep_the_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.concurrency.watchdog.REPORT_TIMEOUT_S", 0.01)
    released, ended, ends = threading.Event(), threading.Event(), list[int]()

    class Hanging(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            released.wait(WAIT_S)

    handler = Hanging()
    logging.getLogger("sluice.concurrency.watchdog").addHandler(handler)
    try:
        with dog(Scripted(StallVerdict.HOPELESS), ends, ended, None).watching():
            await until_set(ended)
            assert not released.is_set()
    finally:
        released.set()
        logging.getLogger("sluice.concurrency.watchdog").removeHandler(handler)
    assert ends == [EXIT_STALLED]


async def test_stacks_that_cannot_be_written_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("no folder", encoding="utf-8")
    judge = Scripted(StallVerdict.STALLED)
    with dog(judge, [], threading.Event(), tmp_path / "logs" / "x.txt").watching():
        await until_set(judge.is_through)
    assert "rollout-1: generating" in caplog.text
    assert "stacks of all" not in caplog.text


async def test_its_thread_ends_with_its_block() -> None:
    with dog(Scripted(), [], threading.Event(), None).watching():
        assert "watchdog" in {thread.name for thread in threading.enumerate()}
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


async def test_a_look_that_fails_has_seen_nothing() -> None:
    judge = Scripted()

    def broken() -> WorkState:
        raise EngineError("the engine broke")

    with Watchdog(judge, broken, interval_s=0.01).watching():
        await until_set(judge.is_through)
    assert judge.check(1e9) is StallVerdict.FINE
    assert judge.no_progress_at_work_s is None


async def test_a_watched_service_is_marked_in_the_runs_folder_and_tells_how_long_it_stands(
    tmp_path: Path,
) -> None:
    assert no_progress_seconds() is None
    with watch_service("reward", ServiceConfig(run_dir=str(tmp_path)), lambda: WorkState(0)):
        assert (tmp_path / "processes" / "reward.json").is_file()
        async with asyncio.timeout(WAIT_S):
            while no_progress_seconds() is None:
                await asyncio.sleep(0.01)
    assert not list((tmp_path / "processes").iterdir())
    assert no_progress_seconds() is None
