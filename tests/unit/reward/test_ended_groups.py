"""The archive of samples: every group that ended, with its texts, and never a wait for the disk."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from services.reward.ended_groups import MOST_WAITING, EndedGroups
from services.reward.group_log import GroupLog
from services.reward.run_files import RunFiles, open_run_files
from sluice.config.run import RunConfig
from sluice.telemetry.sample_archive import SampleArchive, archive_files
from sluice.telemetry.sampled_group import SampledGroup
from sluice.types import PromptEnd
from tests.support.client_prompt import client_prompt
from tests.support.reward_loop import ScriptedClient, replica, running_loop, submit


def groups_in(folder: Path) -> dict[str, SampledGroup]:
    lines = [line for path in archive_files(folder) for line in path.read_bytes().splitlines()]
    found = [msgspec.json.decode(line, type=SampledGroup) for line in lines]
    return {group.prompt_id: group for group in found}


def add(ended: EndedGroups, prompt_id: str) -> None:
    prompt = client_prompt(prompt_id=prompt_id)
    ended.add(prompt, PromptEnd.DROPPED_FAILED, None, version=1, step=None, replicas=["a"])


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


def test_groups_that_the_disk_cannot_take_in_time_are_left_out_oldest_first(
    tmp_path: Path,
) -> None:
    ended = EndedGroups(SampleArchive(tmp_path, 1 << 24), 1000)
    for number in range(MOST_WAITING + 10):
        add(ended, str(number))
    ended.write()
    names = set(groups_in(tmp_path))
    assert names == {str(number) for number in range(10, MOST_WAITING + 10)}


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
