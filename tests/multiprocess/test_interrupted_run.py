"""Ctrl-C on `sluice up`: it saves, and the resumed run shows its steps."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from functools import partial
from io import StringIO
from pathlib import Path

from rich.console import Console

from sluice.cli.run.checked import check_run
from sluice.client.run_monitor import RunMonitor
from sluice.concurrency.process import process_marks
from sluice.config.loading.loader import load_config
from tests.support.small_run import ENDLESS, SLOWLY, WAIT_S, Assets, is_running
from tests.support.threaded_launch import ThreadedUp, threaded_up

SLUICE = (sys.executable, "-m", "sluice.cli.main", "up")


async def printed(run: ThreadedUp, pattern: str) -> None:
    """Wait for a line."""
    async with asyncio.timeout(WAIT_S):
        while re.search(pattern, run.printed(), re.MULTILINE) is None:
            assert run.poll() is None, run.printed()
            await asyncio.sleep(0.1)


async def test_ctrl_c_saves_and_the_resumed_run_prints_its_steps_and_its_end(
    small_assets: Assets, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    settings = [
        f"sluice.run_dir={folder}",
        *ENDLESS,
        SLOWLY,
        "trainer.save_freq=1000000",
        "actor_rollout_ref.actor.optim.lr=0.00001",
        "trainer.resume_mode=auto",
    ]
    with threaded_up(load_config(small_assets.config, settings), tmp_path / "up.log") as run:
        await printed(run, r"^step +3/")
        endpoints = json.loads((folder / "endpoints.json").read_text())
        async with RunMonitor(endpoints["trainer"], endpoints["reward"]) as monitor:
            assert (await monitor.snapshot()).step >= 3
        pids = [mark.pid for mark in process_marks(folder)]
        run.interrupt()
        assert await asyncio.to_thread(run.wait) == 130
    text = run.printed()
    assert "press Ctrl-C again to end it at once" in text
    summary = json.loads((folder / "summary.json").read_text())
    step = summary["checkpoint_step"]
    assert (summary["outcome"], summary["step"]) == ("interrupted", step)
    assert f"resume      sluice up {folder}/config.yaml  # from step {step}\n" in text
    assert len(pids) == 3
    assert not any(map(is_running, pids))

    settings = [f"trainer.total_training_steps={step + 2}"]
    notices = StringIO()
    read = partial(check_run, folder / "config.yaml", settings, Console(file=notices))
    config = (await asyncio.to_thread(read)).config
    assert "has no effect" not in notices.getvalue(), "notes on keys were shown before"
    with threaded_up(config, tmp_path / "resumed.log") as resumed:
        assert await asyncio.to_thread(resumed.wait) == 0, resumed.printed()
    text = resumed.printed()
    for done in (step + 1, step + 2):
        assert re.search(rf"^step +{done}/{step + 2}  ", text, re.MULTILINE)
    assert f"finished after step {step + 2} of {step + 2}" in text
    assert f"report      {folder}/report.html\n" in text
    assert (folder / "report.html").is_file()


def test_a_run_whose_output_nobody_reads_any_more_continues_and_saves_at_ctrl_c(
    small_assets: Assets, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = [f"sluice.run_dir={run}", *ENDLESS, SLOWLY, "trainer.save_freq=1000000"]
    process = subprocess.Popen(
        [*SLUICE, str(small_assets.config), *options], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        metrics, ends_s = run / "metrics.jsonl", time.monotonic() + WAIT_S
        while not metrics.is_file() or not metrics.read_text():
            assert process.poll() is None
            assert time.monotonic() < ends_s
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    finally:
        process.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["checkpoint_step"] == summary["step"] >= 1
    assert (run / "report.html").is_file()
