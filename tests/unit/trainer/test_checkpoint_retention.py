"""Old policies and critics are deleted by their own counts, newest saved kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.learner.checkpoint import (
    CheckpointStore,
    StoredCheckpoint,
    read_checkpoint,
    resume_remedy,
    superfluous_roles,
)
from sluice.errors import CheckpointError
from tests.support.crashing_saver import save

ROLES = ("actor", "critic")
counts = st.none() | st.integers(1, 4)


@given(
    roles=st.lists(st.frozensets(st.sampled_from(ROLES), min_size=1), max_size=6),
    keep=st.fixed_dictionaries({"actor": counts, "critic": counts}),
)
def test_of_each_role_exactly_the_newest_stay(
    roles: list[frozenset[str]], keep: dict[str, int | None]
) -> None:
    stored = [StoredCheckpoint(Path(f"{i}"), held) for i, held in enumerate(roles)]
    gone = superfluous_roles(stored, keep)
    for role in ROLES:
        before = [one.folder for one in stored if role in one.roles]
        after = [folder for folder in before if role not in gone.get(folder, frozenset())]
        assert after == before[: keep[role]]


def saved(root: Path, steps: int, **keep: int) -> None:
    for step in range(1, steps + 1):
        save(root, step, f"{step}", **keep)
        os.utime(root / f"global_step_{step}" / "data.json", (step, step))


def holders(root: Path, role: str) -> list[str]:
    return sorted(path.parent.name for path in root.glob(f"global_step_*/{role}"))


def test_a_folder_goes_when_nothing_is_left_in_it(tmp_path: Path) -> None:
    saved(tmp_path, 4, keep=2, keep_critic=2)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_3",
        "global_step_4",
    ]


def test_critics_may_be_kept_longer_and_cannot_be_resumed_from(tmp_path: Path) -> None:
    saved(tmp_path, 4, keep=1)
    assert holders(tmp_path, "actor") == ["global_step_4"]
    assert holders(tmp_path, "critic") == [f"global_step_{step}" for step in (1, 2, 3, 4)]
    with pytest.raises(CheckpointError, match="holds no policy any more"):
        read_checkpoint(tmp_path / "global_step_2")


def test_policies_may_be_kept_longer_and_stay_whole(tmp_path: Path) -> None:
    saved(tmp_path, 3, keep_critic=1)
    assert holders(tmp_path, "critic") == ["global_step_3"]
    assert [read_checkpoint(tmp_path / f"global_step_{s}").step for s in (1, 2, 3)] == [1, 2, 3]


def test_a_restarted_run_deletes_what_the_former_one_left(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    saved_by_another_process = CheckpointStore(tmp_path).latest()
    assert saved_by_another_process is not None
    save(tmp_path, 4, "4", keep=2, keep_critic=2)
    assert holders(tmp_path, "actor") == ["global_step_3", "global_step_4"]


def test_the_remedy_names_the_newest_whole_checkpoint_with_a_policy(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    (tmp_path / "global_step_3" / "actor" / "model.safetensors").write_text("torn")
    remedy = resume_remedy(tmp_path / "global_step_4")
    assert f"trainer.resume_from_path={tmp_path / 'global_step_2'}" in remedy
