"""A process killed at any file operation of a save leaves a checkpoint that resume can take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.learner.checkpoint import CheckpointStore
from sluice.types import DataProgress
from tests.support import crashing_saver
from tests.support.source_tree import ROOT

CONTENTS = {1: {"first"}, 2: {"second", "third"}, 3: {"third"}}


def copies_of(scenario: str, folder: Path) -> list[Path]:
    """One folder of checkpoints for every operation a process died at; the last one lived."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.crashing_saver", str(folder), scenario],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Path(copy) for copy in json.loads(done.stdout)]


@pytest.mark.parametrize("scenario", crashing_saver.SCENARIOS)
def test_wherever_a_save_dies_resume_finds_a_whole_checkpoint(
    scenario: str, tmp_path: Path
) -> None:
    copies = copies_of(scenario, tmp_path)
    assert len(copies) > 15
    steps = []
    for root in copies:
        found = CheckpointStore(root).latest()  # raises if what the tracker names is not whole
        assert found is not None, root.name
        steps.append(found.step)
        text = (found.actor / "model.safetensors").read_text(encoding="utf-8")
        assert text in CONTENTS[found.step], root.name
        moments = (found.actor / "optimizer.safetensors").read_text(encoding="utf-8")
        assert moments == f"{text} moments", root.name
        assert (found.actor.parent / "critic" / "model.safetensors").read_text() == text
        assert found.progress == DataProgress(found.step)
    assert steps == sorted(steps), "once the new one is found, it stays found"
    assert steps[0] == 2
    assert steps[-1] == (2 if scenario == "same step again" else 3)


def test_the_next_save_clears_away_what_a_killed_one_left(tmp_path: Path) -> None:
    for root in copies_of("same step again", tmp_path):
        crashing_saver.save(root, 9, "last", keep=2, keep_critic=2)
        names = {path.name for path in root.iterdir()}
        expected = {"latest_checkpointed_iteration.txt", "global_step_2", "global_step_9"}
        assert names == expected, root.name
