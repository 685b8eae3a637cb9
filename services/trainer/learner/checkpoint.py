"""Checkpoints on disk: written aside and renamed when complete, so that none is ever half there.

<root>/latest_checkpointed_iteration.txt   step of the newest, replaced after the rename
<root>/global_step_<N>/actor/              what `Learner.save` writes
<root>/global_step_<N>/data.json           data progress, counters, and the size of every file
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.config.trainer import TrainerConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.types import DataProgress

logger = logging.getLogger(__name__)

TRACKER_FILE = "latest_checkpointed_iteration.txt"
DATA_FILE = "data.json"
ACTOR_FOLDER = "actor"
_FOLDER_NAME = re.compile(r"global_step_(\d+)")
_PARTIAL, _REPLACED = ".partial", ".replaced"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `counters` are what the caller of `CheckpointStore.save` gave."""

    step: int
    actor: Path
    progress: DataProgress
    counters: Mapping[str, float]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: ``trainer.default_local_dir``, made when first saved to.
        keep: newest checkpoints left on disk after a save; ``None`` keeps all.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self._root, self._keep = root, keep

    def save(
        self,
        step: int,
        write_actor: Callable[[Path], None],
        progress: DataProgress,
        counters: Mapping[str, float],
    ) -> Path:
        """Write the checkpoint of `step`; until this returns, the former one is the latest.

        Args:
            step: finished train batches.
            write_actor: fills the given folder (`Learner.save`).
            progress: where the data stream stands.
            counters: further numbers the run continues from.

        Returns:
            the checkpoint's folder.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        partial = self._root / f".global_step_{step}{_PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_actor(partial / ACTOR_FOLDER)
        _write_data(partial, step, progress, counters)
        _sync_tree(partial)
        folder = self._folder(step)
        replaced = self._root / f".global_step_{step}{_REPLACED}"
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial.rename(folder)
        _sync(self._root)
        self._write_tracker(step)
        shutil.rmtree(replaced, ignore_errors=True)
        self._delete_old(folder)
        return folder

    def latest(self) -> Checkpoint | None:
        """The checkpoint the tracker names; ``None`` if there is no tracker.

        Raises:
            CheckpointError: the tracker is no number, or its checkpoint is missing or incomplete.
        """
        tracker = self._root / TRACKER_FILE
        if not tracker.exists():
            return None
        content = tracker.read_text(encoding="ascii", errors="replace").strip()
        if not content.isdecimal():
            raise CheckpointError(
                f"{tracker} should hold the step of the latest checkpoint, not '{content[:40]}'; "
                "correct it, or set trainer.resume_mode=disable"
            )
        self._undo_interrupted_replacement(int(content))
        return read_checkpoint(self._folder(int(content)))

    def _folder(self, step: int) -> Path:
        return self._root / f"global_step_{step}"

    def _undo_interrupted_replacement(self, step: int) -> None:
        """Put back a checkpoint that was moved away for a newer one that never took its place."""
        replaced = self._root / f".global_step_{step}{_REPLACED}"
        if replaced.exists() and not self._folder(step).exists():
            replaced.rename(self._folder(step))

    def _write_tracker(self, step: int) -> None:
        fresh = self._root / f".{TRACKER_FILE}{_PARTIAL}"
        fresh.write_text(f"{step}", encoding="ascii")
        _sync(fresh)
        fresh.replace(self._root / TRACKER_FILE)
        _sync(self._root)

    def _delete_old(self, newest: Path) -> None:
        """Keep the last saved ones, by what is on disk, whichever process wrote them."""
        if self._keep is None:
            return
        complete = [
            folder
            for folder in self._root.iterdir()
            if _FOLDER_NAME.fullmatch(folder.name) and (folder / DATA_FILE).exists()
        ]
        complete.sort(key=lambda folder: (folder / DATA_FILE).stat().st_mtime_ns, reverse=True)
        complete.sort(key=lambda folder: folder != newest)
        for folder in complete[self._keep :]:
            doomed = folder.with_name(f".{folder.name}{_PARTIAL}")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            logger.info("checkpoint %s deleted (trainer.max_actor_ckpt_to_keep)", folder.name)


def resume_point(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to go on from by ``trainer.resume_mode``; ``None``: start from the beginning.

    Raises:
        ConfigError: ``resume_path`` without a folder called ``global_step_N``.
        CheckpointError: the checkpoint is missing or incomplete.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        found = store.latest()
        if found is None:
            logger.info("no checkpoint to resume from: starting at step 0")
        return found
    path = Path(trainer.resume_from_path or "")
    if not _FOLDER_NAME.fullmatch(path.name):
        raise ConfigError(
            f"trainer.resume_from_path='{trainer.resume_from_path}': with resume_mode=resume_path "
            "give a folder called global_step_N"
        )
    return read_checkpoint(path)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check that `folder` is complete and read its progress.

    Raises:
        CheckpointError: a file is missing or of another size, or the folder holds another step.
    """
    remedy = "choose another with trainer.resume_mode=resume_path, or start anew with disable"
    try:
        data = json.loads((folder / DATA_FILE).read_text(encoding="utf-8"))
        step, files = int(data["step"]), dict(data["files"])
        progress = DataProgress(
            int(data["progress"]["low_water"]), tuple(map(int, data["progress"]["ended_above"]))
        )
        counters = {str(name): float(value) for name, value in data["counters"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is no complete checkpoint ({DATA_FILE}: {error!r}); {remedy}"
        ) from error
    if folder.name != f"global_step_{step}":
        raise CheckpointError(f"{folder} holds step {step}; its folder was renamed; {remedy}")
    for name, size in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(
                f"{folder} is incomplete: {name} should be {size} bytes; {remedy}"
            )
    return Checkpoint(step, folder / ACTOR_FOLDER, progress, counters)


def _write_data(
    folder: Path, step: int, progress: DataProgress, counters: Mapping[str, float]
) -> None:
    files = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    data = {
        "step": step,
        "progress": {
            "low_water": progress.low_water,
            "ended_above": list(progress.ended_above),
        },
        "counters": dict(counters),
        "files": files,
    }
    (folder / DATA_FILE).write_text(json.dumps(data, indent=1), encoding="utf-8")


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Force a file, or a folder's list of names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
