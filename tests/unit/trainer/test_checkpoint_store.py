"""Checkpoints on disk: whole or absent, after a crash too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.learner import checkpoint
from services.trainer.learner.checkpoint import (
    Checkpoint,
    CheckpointStore,
    num_to_keep,
    resume_point,
    resume_remedy,
)
from sluice.config.schema.trainer import TrainerConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.types import DataProgress
from tests.support import crashing_saver
from tests.support.crashing_saver import write_checkpoint
from tests.support.source_tree import ROOT

PROGRESS = DataProgress(7, (9, 12))


def write_actor(folder: Path) -> None:
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "model.safetensors").write_bytes(b"weights")


def save(store: CheckpointStore, step: int) -> Path:
    return write_checkpoint(store, step, write_actor, PROGRESS)


def latest(store: CheckpointStore) -> Checkpoint:
    found = store.latest()
    assert found is not None
    return found


def steps_on_disk(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.is_file())


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = save(store, 3)
    assert latest(CheckpointStore(tmp_path / "checkpoints")) == Checkpoint(
        3, folder / "actor", PROGRESS
    )
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text(encoding="ascii") == "3"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    write_checkpoint(store, 1, write_actor, DataProgress(8))
    assert latest(store).progress == DataProgress(8)
    assert steps_on_disk(tmp_path) == ["global_step_1"]


@pytest.mark.parametrize("damage", ["missing", "short", "no data"])
def test_an_incomplete_checkpoint_is_never_picked(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    folder = save(store, 5)
    weights = folder / "actor" / "huggingface" / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "short":
        weights.write_bytes(b"weigh")
    else:
        (folder / "data.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"global_step_5 is (not a complete|incomplete).*resume"
    ):
        store.latest()


def test_a_tracker_without_its_checkpoint_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    shutil.rmtree(save(store, 5))
    with pytest.raises(CheckpointError, match="global_step_5"):
        store.latest()


def test_a_tracker_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../other", encoding="ascii")
    with pytest.raises(CheckpointError, match="should hold the step"):
        CheckpointStore(tmp_path).latest()


def test_older_checkpoints_go_even_those_of_a_former_process(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        os.utime(save(CheckpointStore(tmp_path), step) / "data.json", (step, step))
    save(CheckpointStore(tmp_path, keep=2), 4)
    assert steps_on_disk(tmp_path) == ["global_step_3", "global_step_4"]


def test_the_newest_stays_although_an_abandoned_run_left_higher_steps(tmp_path: Path) -> None:
    os.utime(save(CheckpointStore(tmp_path), 90) / "data.json", (1, 1))
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    assert steps_on_disk(tmp_path) == ["global_step_2"]
    assert latest(store).step == 2


def test_auto_without_a_checkpoint_starts_at_step_0(tmp_path: Path) -> None:
    assert resume_point(TrainerConfig(), CheckpointStore(tmp_path / "none")) is None


def test_auto_resumes_from_the_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    found = resume_point(TrainerConfig(), store)
    assert found is not None
    assert found.step == 2


def test_disable_ignores_what_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    assert resume_point(TrainerConfig(resume_mode="disable"), store) is None


def test_resume_path_names_its_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = save(store, 1)
    save(store, 2)
    trainer = TrainerConfig(resume_mode="resume_path", resume_from_path=str(first))
    found = resume_point(trainer, store)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("path", [None, "somewhere/else"])
def test_resume_path_must_be_a_step_folder(tmp_path: Path, path: str | None) -> None:
    trainer = TrainerConfig(resume_mode="resume_path", resume_from_path=path)
    with pytest.raises(ConfigError, match=r"resume_from_path='.*give a folder called global_step"):
        resume_point(trainer, CheckpointStore(tmp_path))


def test_resume_path_to_nothing_is_an_error(tmp_path: Path) -> None:
    trainer = TrainerConfig(
        resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_4")
    )
    with pytest.raises(CheckpointError, match="global_step_4 is not a complete checkpoint"):
        resume_point(trainer, CheckpointStore(tmp_path))


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 4)
    renamed = folder.rename(tmp_path / "global_step_40")
    trainer = TrainerConfig(resume_mode="resume_path", resume_from_path=str(renamed))
    with pytest.raises(CheckpointError, match="holds step 4"):
        resume_point(trainer, CheckpointStore(tmp_path))


def test_progress_is_readable_json(tmp_path: Path) -> None:
    data = json.loads((save(CheckpointStore(tmp_path), 4) / "data.json").read_text("utf-8"))
    assert data["progress"] == {"low_water": 7, "ended_above": [9, 12], "sources": {}}


def test_the_progress_of_each_source_is_found_again(tmp_path: Path) -> None:
    progress = DataProgress(0, (), {"math": DataProgress(12, (14,)), "code": DataProgress(4)})
    write_checkpoint(CheckpointStore(tmp_path), 2, write_actor, progress)
    assert latest(CheckpointStore(tmp_path)).progress == progress


def test_what_another_version_notes_beside_it_is_passed_over(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 3)
    expected = latest(CheckpointStore(tmp_path))
    file = folder / checkpoint.DATA_FILE
    noted = json.loads(file.read_text(encoding="utf-8")) | {"of_another_version": [1]}
    file.write_text(json.dumps(noted), encoding="utf-8")
    assert latest(CheckpointStore(tmp_path)) == expected


def test_a_checkpoint_of_verl_is_refused_with_the_way_to_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_100"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model_world_size_8_rank_0.pt").write_bytes(b"")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100", encoding="ascii")
    with pytest.raises(CheckpointError, match=r"a checkpoint of verl.* `sluice merge .* OUT`"):
        resume_point(TrainerConfig(), CheckpointStore(tmp_path))


def test_a_relative_resume_path_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CheckpointStore(tmp_path / "checkpoints"), 4)
    monkeypatch.chdir(tmp_path)
    trainer = TrainerConfig(
        resume_mode="resume_path", resume_from_path="checkpoints/global_step_4/"
    )
    found = resume_point(trainer, CheckpointStore(tmp_path / "elsewhere"))
    assert found is not None
    assert found.actor == tmp_path / "checkpoints" / "global_step_4" / "actor"


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"of step 1 cannot be written to .*file"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)


def test_a_full_disk_leaves_the_former_checkpoint_and_no_half_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def fill(folder: Path) -> None:
        write_actor(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step 2 cannot be written .*No space left"):
        write_checkpoint(store, 2, fill, PROGRESS)
    assert latest(store).step == 1
    assert steps_on_disk(tmp_path) == ["global_step_1"]


CONTENTS = {1: {"first"}, 2: {"second", "third"}, 3: {"third"}}


def copies_of(scenario: str, folder: Path) -> list[Path]:
    """Return one folder of checkpoints per operation at which a process died; the last survived."""
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
        crashing_saver.save(root, 9, "last", keep=2)
        names = {path.name for path in root.iterdir()}
        expected = {"latest_checkpointed_iteration.txt", "global_step_2", "global_step_9"}
        assert names == expected, root.name


@pytest.mark.parametrize(
    ("actor", "critic", "kept"),
    [(2, None, 2), (2, 3, 3), (3, 2, 3), (None, 2, None), (None, None, None)],
)
def test_a_checkpoint_stays_while_the_policys_or_the_critics_count_keeps_it(
    actor: int | None, critic: int | None, kept: int | None
) -> None:
    trainer = TrainerConfig(max_actor_ckpt_to_keep=actor, max_critic_ckpt_to_keep=critic)
    assert num_to_keep(trainer, with_critic=True) == kept
    assert num_to_keep(trainer, with_critic=False) == actor


def test_the_remedy_names_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        os.utime(save(CheckpointStore(tmp_path), step) / "data.json", (step, step))
    weights = tmp_path / "global_step_3" / "actor" / "huggingface" / "model.safetensors"
    weights.write_text("torn")
    remedy = resume_remedy(tmp_path / "global_step_4")
    assert f"trainer.resume_from_path={tmp_path / 'global_step_2'}" in remedy
    later = resume_remedy(tmp_path / "global_step_1")
    assert later.startswith("resume from another complete one with")
    assert later.endswith(f"trainer.resume_from_path={tmp_path / 'global_step_4'}")


def test_a_protected_checkpoint_stays_beside_the_newest_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.protects = lambda steps: {1}.intersection(steps)
    for step in (1, 2, 3):
        save(store, step)
    assert steps_on_disk(tmp_path) == ["global_step_1", "global_step_3"]
    assert store.saved_steps() == {1, 3}
    assert store.checkpoint(1).step == 1
