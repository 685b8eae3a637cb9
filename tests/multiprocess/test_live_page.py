"""The dashboard beside the trainer: a process of its own that costs training nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from services.trainer.leader import live_page
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.dashboard.serving import URL_NAME
from tests.support.dashboard_run import fill_run, make_run
from tests.support.small_run import is_running, processes_naming

WAIT_S = 240.0
MIN_PRIORITY = 19


def configured(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(make_run(run_dir, *overrides) / "config.yaml", ())


async def address(run_dir: Path) -> str:
    ends_s = time.monotonic() + WAIT_S
    while not (text := _text(run_dir / URL_NAME)):
        assert time.monotonic() < ends_s, "the page is not served"
        await asyncio.sleep(0.05)
    return text


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return bytes(answer.read())


def page_process(run_dir: Path) -> int:
    """The one process whose command serves the page of the folder."""
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _serves(entry, run_dir)
    ]
    (pid,) = found
    return pid


def _serves(entry: Path, run_dir: Path) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "dashboard" in words and str(run_dir) in words


async def test_the_page_is_served_without_a_launcher_too_until_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.leader._PAGE_ENDS_S", WAIT_S)
    config = configured(tmp_path, "sluice.dashboard.port=0")
    fill_run(tmp_path)
    (tmp_path / "config.yaml").unlink()  # `torchrun` leaves none in the folder
    async with live_page(config):
        url = await address(tmp_path)
        pid = page_process(tmp_path)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 10, MIN_PRIORITY)
        body = await asyncio.to_thread(fetched, f"{url}api/overview")
        assert json.loads(body)["name"] == tmp_path.name
    assert not is_running(pid)
    assert not (tmp_path / URL_NAME).exists()
    assert processes_naming(tmp_path) == []
    assert load_config(tmp_path / "config.yaml", ()) == config


async def test_no_process_is_started_without_a_port(tmp_path: Path) -> None:
    async with live_page(configured(tmp_path)):
        assert processes_naming(tmp_path) == []


async def test_a_page_that_dies_is_reported_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path, "sluice.dashboard.port=0")
    with caplog.at_level(logging.WARNING):
        async with live_page(config):
            await address(tmp_path)
            os.kill(page_process(tmp_path), signal.SIGKILL)
            ends_s = time.monotonic() + WAIT_S
            while "training continues" not in caplog.text:
                assert time.monotonic() < ends_s
                await asyncio.sleep(0.05)


async def test_a_page_that_hangs_is_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.leader._PAGE_ENDS_S", 0.2)
    async with live_page(configured(tmp_path, "sluice.dashboard.port=0")):
        await address(tmp_path)
        pid = page_process(tmp_path)
        os.kill(pid, signal.SIGSTOP)
    assert not is_running(pid)
