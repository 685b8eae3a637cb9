"""Ctrl-C on `sluice up` with output in a file: it saves, and the resumed run shows its steps."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from sluice.client.run_monitor import RunMonitor
from tests.support.small_run import ENDLESS, SLOWLY, WAIT_S, Assets, processes_naming

SLUICE = (sys.executable, "-m", "sluice.cli.main", "up")


def start(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen([*SLUICE, *arguments], stdout=output, stderr=subprocess.STDOUT)


async def logged(process: subprocess.Popen[bytes], log: Path, pattern: str) -> re.Match[str]:
    """Wait for a line of the log."""
    async with asyncio.timeout(WAIT_S):
        while (found := re.search(pattern, log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.1)
    return found


async def test_ctrl_c_saves_and_the_resumed_run_prints_its_steps_and_its_end(
    small_assets: Assets, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "up.log"
    process = start(
        log,
        str(small_assets.config),
        f"sluice.run_dir={run}",
        *ENDLESS,
        SLOWLY,
        "trainer.save_freq=1000000",
        "actor_rollout_ref.actor.optim.lr=0.00001",
    )
    try:
        await logged(process, log, r"^step +3/")
        endpoints = json.loads((run / "endpoints.json").read_text())
        async with RunMonitor(endpoints["trainer"], endpoints["reward"]) as monitor:
            assert (await monitor.snapshot()).step >= 3
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.to_thread(process.wait) == 130
    finally:
        process.kill()
    text = log.read_text()
    assert "press Ctrl-C again to end it at once" in text
    summary = json.loads((run / "summary.json").read_text())
    step = summary["checkpoint_step"]
    assert (summary["outcome"], summary["step"]) == ("interrupted", step)
    assert f"resume      sluice up {run}/config.yaml  # from step {step}\n" in text
    assert processes_naming(run) == []

    log = tmp_path / "resumed.log"
    resumed = start(log, f"{run}/config.yaml", f"trainer.total_training_steps={step + 2}")
    try:
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.to_thread(resumed.wait) == 0, log.read_text()
    finally:
        resumed.kill()
    text = log.read_text()
    assert "has no effect" not in text, "notes on keys were shown at the first start"
    for done in (step + 1, step + 2):
        assert re.search(rf"^step +{done}/{step + 2}  ", text, re.MULTILINE)
    assert f"finished after step {step + 2} of {step + 2}" in text
    assert f"report      {run}/report.html\n" in text
    assert (run / "report.html").is_file()


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
