"""Checkpoints on disk: save, find the one to start from, and delete old ones.

A checkpoint is written to a temporary folder and renamed when it is complete, so that a crash never
leaves half a checkpoint under its final name. A policy and its critic stay, and go, together.

    <root>/latest_checkpointed_iteration.txt   step of the newest; replaced after the rename
    <root>/global_step_<N>/actor/, critic/     written by `Learner.save`
    <root>/global_step_<N>/data.json           data progress, and the size of every file
    <root>/.global_step_<N>.partial            being written or deleted; removed at the next save
    <root>/.global_step_<N>.replaced           former checkpoint of a step that is saved again
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.concurrency.waits import advance
from sluice.config.schema.trainer import TrainerConfig
from sluice.errors import CheckpointError, ConfigError
from sluice.service_contract import MARK_VARIABLE, checkpoint_mark, restarts
from sluice.types import DataProgress

logger = logging.getLogger(__name__)

ACTOR_FOLDER = "actor"
CRITIC_FOLDER = "critic"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
DATA_FILE = "data.json"
VERL_DATA_FILE = "data.pt"
_FOLDER_NAME = re.compile(r"global_step_(\d+)")
_PARTIAL = ".partial"
_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, and the position in the data set at its step."""

    step: int
    actor: Path
    progress: DataProgress


class _Data(msgspec.Struct):
    """The file ``data.json``; `files` are sizes in bytes, by path in the checkpoint's folder."""

    step: int
    progress: DataProgress
    files: dict[str, int]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: ``trainer.default_local_dir``; the first save creates it.
        keep: number of newest checkpoints that a save leaves on disk; ``None`` keeps all.

    Attributes:
        protects: returns the steps on disk that no save may delete; called from any thread.
    """

    def __init__(self, root: Path, keep: int | None = None) -> None:
        self.root = root
        self._keep = keep
        self.protects: Callable[[Collection[int]], Collection[int]] = lambda _steps: ()

    def begin(self, step: int) -> Path:
        """Begin the checkpoint of `step`; return the policy's folder, which does not exist yet.

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        with self._name_step_in_errors(step):
            self.root.mkdir(parents=True, exist_ok=True)
            self._clean_up()
            self._partial(step).mkdir()
        return self._partial(step) / ACTOR_FOLDER

    def finish(self, step: int, write: Callable[[], None], progress: DataProgress) -> Path:
        """Complete the checkpoint that `begin` began, and return its folder; from any one thread.

        Until this returns, the previous checkpoint is the latest.

        Args:
            write: fills the folder that `begin` returned (`Learner.begin_save`).

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        with self._name_step_in_errors(step):
            self._move_into_place(step, self._write_partial(step, write, progress))
        try:
            self._delete_old(self.folder(step))
        except OSError as error:  # the new checkpoint is complete, so this ends no run
            logger.warning("old checkpoints in %s cannot be deleted: %s", self.root, error)
        return self.folder(step)

    @contextmanager
    def _name_step_in_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.root} ({error}); free "
                "space there, or lower trainer.max_*_ckpt_to_keep"
            ) from error

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that the tracker file names; ``None`` without a tracker.

        Raises:
            CheckpointError: the tracker holds no number, or its checkpoint is missing or
                incomplete; the error names the newest complete one.
        """
        tracker = self.root / TRACKER_FILE
        if not tracker.exists():
            return None
        content = tracker.read_text(encoding="ascii", errors="replace").strip()
        if not content.isdecimal():
            raise CheckpointError(
                f"{tracker} should hold the step of the latest checkpoint, not '{content[:40]}'; "
                "correct it, or set trainer.resume_mode=disable"
            )
        self._undo_interrupted_replacement(int(content))
        return read_checkpoint(self.folder(int(content)))

    def saved_steps(self) -> frozenset[int]:
        """Return the steps of all complete checkpoints."""
        stored = stored_checkpoints(self.root)
        return frozenset(int(folder.name.rpartition("_")[2]) for folder in stored)

    def checkpoint(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step.

        Raises:
            CheckpointError: it is missing or incomplete.
        """
        return read_checkpoint(self.folder(step))

    def folder(self, step: int) -> Path:
        """Return the folder of the complete checkpoint of a step."""
        return self.root / f"global_step_{step}"

    def _partial(self, step: int) -> Path:
        return self.root / f".global_step_{step}{_PARTIAL}"

    def _write_partial(self, step: int, write: Callable[[], None], progress: DataProgress) -> Path:
        partial = self._partial(step)
        try:
            write()
            _write_data(partial, step, progress)
            _sync_tree(partial)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # it may be large
            raise
        return partial

    def _move_into_place(self, step: int, partial: Path) -> None:
        """Move a written checkpoint to its final name, then write the tracker."""
        folder = self.folder(step)
        replaced = self.root / f".global_step_{step}{_REPLACED}"
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        _sync(self.root)
        self._write_tracker(step)
        shutil.rmtree(replaced, ignore_errors=True)

    def _clean_up(self) -> None:
        """Remove the leftovers of a process that was killed while it saved or deleted."""
        for path in self.root.glob(f".global_step_*{_REPLACED}"):
            original = path.with_name(path.name[1 : -len(_REPLACED)])
            if original.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(original)
        for path in self.root.glob(f".global_step_*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)

    def _undo_interrupted_replacement(self, step: int) -> None:
        """Put back a checkpoint if a crash came between the two renames that replace it."""
        replaced = self.root / f".global_step_{step}{_REPLACED}"
        if replaced.exists() and not self.folder(step).exists():
            replaced.rename(self.folder(step))

    def _write_tracker(self, step: int) -> None:
        fresh = self.root / f".{TRACKER_FILE}{_PARTIAL}"
        fresh.write_text(f"{step}", encoding="ascii")
        _sync(fresh)
        fresh.replace(self.root / TRACKER_FILE)
        _sync(self.root)

    def _delete_old(self, newest: Path) -> None:
        """Delete all but the last saved checkpoints on disk, of this process or another."""
        if self._keep is None:
            return
        stored = sorted(stored_checkpoints(self.root), key=lambda folder: folder != newest)
        protected = {self.folder(step) for step in self.protects(self.saved_steps())}
        for folder in stored[self._keep :]:
            if folder not in protected:
                _delete_folder(folder)
                logger.info("checkpoint %s deleted (trainer.max_*_ckpt_to_keep)", folder.name)


def num_to_keep(trainer: TrainerConfig, *, with_critic: bool) -> int | None:
    """Return how many checkpoints to keep, the larger of both counts; ``None`` for all."""
    keep = trainer.max_actor_ckpt_to_keep
    if keep is None or not with_critic:
        return keep
    return max(keep, trainer.max_critic_ckpt_to_keep or keep)


def stored_checkpoints(root: Path) -> list[Path]:
    """Return the folders of all complete checkpoints below `root`, the last saved first."""
    checkpoints: list[tuple[int, Path]] = []
    for folder in root.iterdir() if root.is_dir() else ():
        if _FOLDER_NAME.fullmatch(folder.name):
            try:
                _read_data(folder)
                saved_ns = (folder / DATA_FILE).stat().st_mtime_ns
            except (OSError, ValueError):
                continue
            checkpoints.append((saved_ns, folder))
    checkpoints.sort(key=lambda pair: pair[0], reverse=True)
    return [folder for _, folder in checkpoints]


def _delete_folder(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a crash leaves none that looks complete."""
    expired = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(expired, ignore_errors=True)
    folder.rename(expired)
    shutil.rmtree(expired, ignore_errors=True)


def resume_point(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to resume from, by ``trainer.resume_mode``; ``None``: start at step 0.

    Raises:
        ConfigError: ``resume_path`` without a folder called ``global_step_N``.
        CheckpointError: the checkpoint is missing or incomplete.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        checkpoint = store.latest()
        if checkpoint is None:
            logger.info("no checkpoint to resume from: starting at step 0")
        return checkpoint
    path = Path(trainer.resume_from_path or "").absolute()
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
    try:
        data = _read_data(folder)
    except (OSError, ValueError) as error:
        _refuse_verl(folder)
        raise CheckpointError(
            f"{folder} is not a complete checkpoint ({DATA_FILE}: {error!r}); "
            f"{resume_remedy(folder)}"
        ) from error
    if folder.name != f"global_step_{data.step}":
        raise CheckpointError(
            f"{folder} holds step {data.step}; its folder was renamed; {resume_remedy(folder)}"
        )
    for name, size in data.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(
                f"{folder} is incomplete: {name} should be {size} bytes; {resume_remedy(folder)}"
            )
    return Checkpoint(data.step, folder / ACTOR_FOLDER, data.progress)


def resume_remedy(folder: Path) -> str:
    """Return the remedy for an unusable checkpoint: the newest other complete one, if any."""
    for candidate in stored_checkpoints(folder.parent):
        if candidate != folder and _is_complete(candidate):
            return (
                "resume from another complete one with trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={candidate}"
            )
    return (
        "resume from another with trainer.resume_mode=resume_path, or begin at step 0 with disable"
    )


def _is_complete(folder: Path) -> bool:
    sizes = _read_data(folder).files.items()
    return all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in sizes)


def _refuse_verl(folder: Path) -> None:
    shards = (folder / ACTOR_FOLDER).glob("model_world_size_*.pt")
    if (folder / VERL_DATA_FILE).exists() or any(shards):
        merge = shlex.join(["sluice", "merge", str(folder), "OUT"])
        raise CheckpointError(
            f"{folder} is a checkpoint of verl, whose optimizer and data position are not taken "
            f"over; start from its weights: `{merge}`, then set "
            "actor_rollout_ref.model.path=OUT and another trainer.default_local_dir"
        )


def _read_data(folder: Path) -> _Data:
    return msgspec.json.decode((folder / DATA_FILE).read_bytes(), type=_Data)


def _write_data(folder: Path, step: int, progress: DataProgress) -> None:
    files = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    text = msgspec.json.encode(_Data(step, progress, files))
    (folder / DATA_FILE).write_bytes(msgspec.json.format(text, indent=1))


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
        advance()
    _sync(folder)


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def start_point(
    trainer: TrainerConfig, store: CheckpointStore, environment: Mapping[str, str] = os.environ
) -> Checkpoint | None:
    """Choose the checkpoint to continue from; ``None``: start at step 0.

    ``trainer.resume_mode`` decides where a run begins. A trainer that its supervisor restarts is in
    the middle of a run: it continues from the newest checkpoint of this run, also with ``disable``
    and ``resume_path``. If the run has saved none yet, it starts where the run began.

    Raises:
        ConfigError, CheckpointError: as `resume_point` and `CheckpointStore.latest`.
    """
    times = restarts(environment)
    if times == 0:
        return resume_point(trainer, store)
    has_saved = checkpoint_mark(store.root) != environment.get(MARK_VARIABLE)
    checkpoint = store.latest() if has_saved else resume_point(trainer, store)
    logger.warning(
        "restarted (%d times so far): the run continues from step %d, %s",
        times,
        checkpoint.step if checkpoint else 0,
        "its last checkpoint" if has_saved else "where it began, since it has saved none",
    )
    return checkpoint
