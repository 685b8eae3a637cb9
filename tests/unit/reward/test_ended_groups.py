"""The archive of samples: every group that ended, with its texts, and never a wait for the disk."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from services.reward.app import RunFiles, open_run_files
from services.reward.records import group_log
from services.reward.records.group_log import GroupLog, waiting_bytes
from sluice.config.run import RunConfig
from sluice.telemetry.samples import (
    SampleArchive,
    SampledGroup,
    archive_files,
    shorten_middle,
)
from sluice.types import ChatMessage
from tests.support.client_prompt import client_prompt
from tests.support.group_events import group_ended
from tests.support.reward_app import ScriptedClient, replica, running_app, submit
from tests.support.source_tree import ROOT


def groups_in(folder: Path) -> dict[str, SampledGroup]:
    lines = [line for path in archive_files(folder) for line in path.read_bytes().splitlines()]
    found = [msgspec.json.decode(line, type=SampledGroup) for line in lines]
    return {group.prompt_id: group for group in found}


def archiving(folder: Path, chars: int = 1000, **bounds: int) -> GroupLog:
    archive = SampleArchive(folder, 1 << 24)
    return GroupLog(None, samples=archive, max_chars=chars, **bounds)


def add(log: GroupLog, prompt_id: str, text: str = "text") -> None:
    prompt = replace(client_prompt(prompt_id=prompt_id), messages=(ChatMessage("user", text),))
    log.observe(group_ended(prompt))


async def test_kept_and_filtered_groups_are_archived_with_their_responses(tmp_path: Path) -> None:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "algorithm": {"filter_groups": {"enable": True}},
    }
    samples = SampleArchive(tmp_path / "samples", 1 << 20)
    log = GroupLog(tmp_path / "groups.jsonl", samples=samples, max_chars=1000)
    files = RunFiles(log=log)
    config = msgspec.convert(tree, RunConfig)
    async with running_app(config, ScriptedClient(), files=files) as app:
        submit(app, ["answer=1 right=0", "answer=1 right=1", "answer=1 right=3"])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        batch = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(batch.batch_id, 1)
    log.close()
    found = groups_in(tmp_path / "samples")
    assert {name: (group.end, group.step) for name, group in found.items()} == {
        "p0": ("filtered_all_wrong", None),
        "p1": ("trained", 1),
        "p2": ("trained", 1),
    }
    for group in found.values():
        assert len(group.responses) == 4
        assert all(response.text and response.score is not None for response in group.responses)
        assert all(response.versions == (0, 0) for response in group.responses)
        assert group.replicas == ["a"]
    lines = (tmp_path / "groups.jsonl").read_text(encoding="utf-8").splitlines()
    steps = {row["prompt_id"]: row["step"] for row in map(msgspec.json.decode, lines)}
    assert steps == {"p0": None, "p1": 1, "p2": 1}


@pytest.mark.parametrize("samples_mb", [0, 1])
def test_a_run_archives_groups_unless_the_config_forbids_it(
    tmp_path: Path, samples_mb: int
) -> None:
    tree = {"sluice": {"run_dir": str(tmp_path), "dashboard": {"samples_mb": samples_mb}}}
    with open_run_files(msgspec.convert(tree, RunConfig)) as files:
        assert files.log is not None
        add(files.log, "p0")
    assert bool(archive_files(tmp_path / "samples")) is (samples_mb > 0)


def test_a_batch_that_ends_at_once_is_kept_whole(tmp_path: Path) -> None:
    log = archiving(tmp_path)
    for number in range(3000):
        add(log, str(number))
    log.close()
    assert len(groups_in(tmp_path)) == 3000


def test_texts_beyond_the_bound_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed, append = threading.Event(), SampleArchive.append

    def wait(archive: SampleArchive, lines: Iterator[bytes]) -> None:
        freed.wait(60)
        append(archive, lines)

    monkeypatch.setattr(SampleArchive, "append", wait)
    log = archiving(tmp_path, 10_000, max_bytes=50_000)
    for number in range(20):
        add(log, str(number), "x" * 10_000)
    freed.set()
    log.close()
    assert {"0", "1", "2", "3"} <= set(groups_in(tmp_path))
    assert "samples of groups never reached their archive" in caplog.text


@pytest.mark.parametrize("letter", ["x", "字"])
@pytest.mark.parametrize("samples", [4 * 4, 512 * 16, 2048 * 32])
def test_the_texts_of_a_whole_batch_may_wait_for_the_archive(letter: str, samples: int) -> None:
    max_chars = 16_384
    text = shorten_middle(letter * 80_000, max_chars)
    assert samples * sys.getsizeof(text) <= 1.01 * waiting_bytes(samples, max_chars)


def test_a_text_that_is_no_unicode_costs_its_group_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = archiving(tmp_path)
    for name, text in (("first", "a"), ("bad", "\ud800"), ("last", "b")):
        add(log, name, text)
    log.close()
    assert set(groups_in(tmp_path)) == {"first", "last"}
    assert "group bad: its samples not logged" in caplog.text


@pytest.mark.parametrize("error", [KeyError("a defect"), OSError("the disk is full")])
def test_an_error_of_the_archive_is_logged_once_and_ends_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fail(_archive: SampleArchive, _lines: object) -> None:
        raise error

    monkeypatch.setattr(SampleArchive, "append", fail)
    log = GroupLog(tmp_path / "groups.jsonl", samples=SampleArchive(tmp_path, 1), max_chars=9)
    for number in range(150):
        add(log, str(number))
    log.close()
    assert len([line for line in caplog.messages if "samples of groups do not reach" in line]) == 1
    assert len((tmp_path / "groups.jsonl").read_bytes().splitlines()) == 150


def lines(folder: Path) -> list[bytes]:
    path = folder / "groups.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def test_a_disk_that_hangs_delays_the_end_for_a_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed = threading.Event()
    monkeypatch.setattr(SampleArchive, "append", lambda *_: freed.wait(60))
    monkeypatch.setattr(group_log, "LAST_S", 0.2)
    log = GroupLog(tmp_path / "groups.jsonl", samples=SampleArchive(tmp_path, 1), max_chars=9)
    for number in range(150):
        add(log, str(number))
    ends_s = time.monotonic() + 60
    while len(lines(tmp_path)) < 150:  # another disk, which takes its lines
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    log.close()
    freed.set()
    assert "samples of groups never reached" in caplog.text
    assert len((tmp_path / "groups.jsonl").read_bytes().splitlines()) == 150


def test_a_process_ends_while_its_disk_hangs() -> None:
    code = (
        "import threading\n"
        "from pathlib import Path\n"
        "from services.reward.records import group_log\n"
        "from tests.support.group_events import group_ended\n"
        "group_log.LAST_S = 0.1\n"
        "group_log._append = lambda *_: threading.Event().wait()\n"
        "log = group_log.GroupLog(Path('nowhere'))\n"
        "log.observe(group_ended())\n"
        "log.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
