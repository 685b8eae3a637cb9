"""Keep a run's checkpoints for their evaluation, also those that the run deletes meanwhile."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.evaluation.results import RESULTS_NAME

_CHECKPOINT = re.compile(r"global_step_(\d+)")
_MODEL = Path("actor") / "huggingface"
_WEIGHTS = "*.safetensors"
_KEPT = "model"
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}


class KeptCheckpoints:
    """The models of a run's checkpoints, kept in the folders of their evaluations.

    A model is kept by hard links, which take no space while the run has it too, and by copies
    where the file system has no links. Checkpoints without whole weights are not kept.

    Args:
        checkpoints: the run's folder of ``global_step_N``.
        evaluations: gets ``global_step_N/model``.
    """

    def __init__(self, checkpoints: Path, evaluations: Path) -> None:
        self._checkpoints, self._evaluations = checkpoints, evaluations
        self._lock = threading.Lock()

    @contextmanager
    def watching(self, look_every_s: float) -> Iterator[None]:
        """Keep each checkpoint that appears while the block runs."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(look_every_s):
                self.look()

        thread = threading.Thread(target=watch, name="checkpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def look(self) -> None:
        """Keep what is there and was not evaluated. What vanishes meanwhile is left out."""
        with self._lock:
            for step in steps_with(self._checkpoints, str(_MODEL)):
                kept = self._kept(step)
                if not kept.exists() and not (kept.parent / RESULTS_NAME).exists():
                    self._keep(self.checkpoint(step) / _MODEL, kept)

    def waiting(self) -> list[int]:
        """Return the steps without an evaluation that has ended, in order."""
        there = {*steps_with(self._checkpoints, "actor"), *steps_with(self._evaluations, _KEPT)}
        return sorted(there - set(self.evaluated()))

    def evaluated(self) -> list[int]:
        """Return the steps whose evaluations have ended, in order."""
        return steps_with(self._evaluations, RESULTS_NAME)

    def checkpoint(self, step: int) -> Path:
        """Return the run's own folder of a checkpoint; the run may have deleted it."""
        return self._checkpoints / f"global_step_{step}"

    def evaluation(self, step: int) -> Path:
        """Return the folder of a checkpoint's evaluation."""
        return self._evaluations / f"global_step_{step}"

    def is_kept(self, step: int) -> bool:
        """Return whether the model is in the folder of its evaluation."""
        return self._kept(step).exists()

    def model(self, step: int) -> Path:
        """Return the folder to evaluate: the kept model, or the run's where none is kept."""
        return self._kept(step) if self.is_kept(step) else self.checkpoint(step)

    def is_there(self, step: int) -> bool:
        """Return whether the model can still be read."""
        return self.is_kept(step) or (self.checkpoint(step) / "actor").is_dir()

    def release(self, step: int) -> None:
        """Delete the kept model: its evaluation has ended."""
        with self._lock:
            shutil.rmtree(self._kept(step), ignore_errors=True)

    def _kept(self, step: int) -> Path:
        return self.evaluation(step) / _KEPT

    def _keep(self, model: Path, kept: Path) -> None:
        if not any(model.glob(_WEIGHTS)):
            return
        draft = kept.with_name(f".{_KEPT}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            shutil.copytree(model, draft, copy_function=_link)
            draft.rename(kept)
        except OSError:  # deleted meanwhile, or no space: then it is evaluated where it is
            shutil.rmtree(draft, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)


def steps_with(folder: Path, content: str) -> list[int]:
    """Return N of each folder ``global_step_N`` with this content, in order."""
    found = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("global_step_*"))
    steps = (int(match[1]) for match in found if match)
    return sorted(step for step in steps if (folder / f"global_step_{step}" / content).exists())
