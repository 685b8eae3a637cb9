"""The archive of samples: every group that ended, with its texts, and never a wait for the disk."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from services.reward.app import RunFiles, open_run_files
from services.reward.records import group_log
from services.reward.records.group_log import EndedGroups, GroupLog
from sluice.config.run import RunConfig
from sluice.telemetry import samples as sample_archive
from sluice.telemetry.samples import SampleArchive, SampledGroup, archive_files
from sluice.types import ChatMessage
from tests.support.client_prompt import client_prompt
from tests.support.group_events import group_ended
from tests.support.reward_loop import ScriptedClient, replica, running_loop, submit


def groups_in(folder: Path) -> dict[str, SampledGroup]:
    lines = [line for path in archive_files(folder) for line in path.read_bytes().splitlines()]
    found = [msgspec.json.decode(line, type=SampledGroup) for line in lines]
    return {group.prompt_id: group for group in found}


def add(ended: EndedGroups, prompt_id: str, text: str = "text") -> None:
    prompt = replace(client_prompt(prompt_id=prompt_id), messages=(ChatMessage("user", text),))
    group = group_ended(prompt).group
    assert group.ending is not None
    ended.add(group, group.ending)


def end_group(log: GroupLog, prompt_id: str) -> None:
    log.observe(group_ended(client_prompt(prompt_id=prompt_id)))


async def test_kept_and_filtered_groups_are_archived_with_their_responses(tmp_path: Path) -> None:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "algorithm": {"filter_groups": {"enable": True}},
    }
    samples = EndedGroups(SampleArchive(tmp_path / "samples", 1 << 20), 1000)
    files = RunFiles(None, GroupLog(tmp_path / "groups.jsonl", samples=samples))
    config = msgspec.convert(tree, RunConfig)
    async with running_loop(config, ScriptedClient(), files=files) as loop:
        submit(loop, ["answer=1 right=0", "answer=1 right=1", "answer=1 right=3"])
        await loop.pipeline.announce("trainer", 0, [replica("a")], None)
        batch = await loop.pipeline.batches.take(1, 0, 5)
        loop.pipeline.batches.acknowledge(batch.batch_id, 1)
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
def test_a_run_archives_groups_unless_it_is_told_not_to(tmp_path: Path, samples_mb: int) -> None:
    tree = {"sluice": {"run_dir": str(tmp_path), "dashboard": {"samples_mb": samples_mb}}}
    with open_run_files(msgspec.convert(tree, RunConfig)) as files:
        assert (files.log._samples is not None) is (samples_mb > 0)


def test_a_batch_that_ends_at_once_is_kept_whole(tmp_path: Path) -> None:
    ended = EndedGroups(SampleArchive(tmp_path, 1 << 24), 1000)
    for number in range(3000):
        add(ended, str(number))
    ended.write()
    assert len(groups_in(tmp_path)) == 3000


def test_texts_beyond_the_bound_are_left_out_oldest_first_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = EndedGroups(SampleArchive(tmp_path, 1 << 24), 10_000, most_bytes=50_000)
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            add(ended, str(number), "x" * 10_000)
        ended.write()
        add(ended, "later")
        ended.write()
    assert set(groups_in(tmp_path)) == {"16", "17", "18", "19", "later"}
    assert [line.split(":")[0] for line in caplog.messages] == [
        "16 groups are missing among the samples"
    ]


def test_only_what_a_line_needs_is_held() -> None:
    """No tokens, log-probs or images, and of a long text only what is kept."""
    ended = EndedGroups(SampleArchive(Path("nowhere"), 1), 10)
    add(ended, "long", "x" * 10_000)
    ((group, size),) = ended._waiting
    assert type(group) is SampledGroup
    assert len(group.prompt) < 100
    assert size < 1000


def test_lines_are_written_as_they_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flush of bytes is in memory at a time, not the queue."""
    monkeypatch.setattr(sample_archive, "_FLUSH_BYTES", 100)
    ended, waited = EndedGroups(SampleArchive(tmp_path, 1 << 24), 1000), []
    write = SampleArchive._write

    def noted(archive: SampleArchive, pending: bytearray) -> None:
        if pending:
            waited.append(len(ended._waiting))
        write(archive, pending)

    monkeypatch.setattr(SampleArchive, "_write", noted)
    for number in range(3):
        add(ended, str(number))
    ended.write()
    assert waited == [2, 1, 0]


def test_a_text_that_is_no_unicode_costs_its_group_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = EndedGroups(SampleArchive(tmp_path, 1 << 24), 1000)
    for name, text in (("first", "a"), ("bad", "\ud800"), ("last", "b")):
        add(ended, name, text)
    ended.write()
    assert set(groups_in(tmp_path)) == {"first", "last"}
    assert "group bad is not kept" in caplog.text


def test_a_defect_of_the_archive_is_told_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_archive: SampleArchive, _lines: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(SampleArchive, "append", fail)
    ended = EndedGroups(SampleArchive(tmp_path, 1 << 24), 1000)
    for number in range(3):
        add(ended, str(number))
        ended.write()
    assert len([line for line in caplog.messages if "a defect of their archive" in line]) == 1
    assert not ended._waiting


async def test_a_disk_that_hangs_delays_the_end_for_a_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, freed = threading.Event(), threading.Event()

    def hang(_archive: SampleArchive, lines: Iterator[bytes]) -> None:
        next(lines)
        hangs.set()
        freed.wait(60)

    monkeypatch.setattr(SampleArchive, "append", hang)
    monkeypatch.setattr(group_log, "LAST_S", 0.2)
    samples = EndedGroups(SampleArchive(tmp_path, 1 << 24), 1000)
    log = GroupLog(tmp_path / "groups.jsonl", samples=samples)
    try:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(log.run())
            for number in range(3):
                end_group(log, str(number))
            assert await asyncio.to_thread(hangs.wait, 30)
            writer.cancel()
    finally:
        freed.set()
    assert "2 samples are lost" in caplog.text
    assert len((tmp_path / "groups.jsonl").read_bytes().splitlines()) == 3


def test_a_process_ends_while_its_disk_hangs() -> None:
    code = (
        "import asyncio, threading\n"
        "from services.reward.records import group_log\n"
        "group_log.LAST_S = 0.1\n"
        "log = group_log.GroupLog(None)\n"
        "log._write = threading.Event().wait\n"
        "async def main():\n"
        "    log._has_lines.set()\n"
        "    task = asyncio.create_task(log.run())\n"
        "    await asyncio.sleep(0.1)\n"
        "    task.cancel()\n"
        "    await asyncio.wait({task})\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_folder_that_cannot_be_written_is_told_once_and_holds_nothing_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    ended = EndedGroups(SampleArchive(tmp_path / "file" / "samples", 1 << 20), 1000)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            add(ended, str(number))
            ended.write()
    assert len([line for line in caplog.messages if "no longer kept" in line]) == 1
    assert not ended._waiting
