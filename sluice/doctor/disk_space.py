"""Room for checkpoints and logs where the run puts them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.config.derived import checkpoint_folder, uses_critic
from sluice.config.memory.model_shape import ModelShape
from sluice.config.run import RunConfig
from sluice.doctor.byte_sizes import GIB, gib
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning

# Logs, metrics, ledger and dumps of samples.
RUN_BYTES = GIB
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOMENTS = 2  # AdamW's, each as large as the weights


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """One folder of the run.

    Attributes:
        key: the configuration key that names it.
        folder: as named; it need not be there yet.
        is_writable: it, or the nearest folder above it that is there.
        free_bytes: of its file system, for this user.
        checkpoint_bytes: of one checkpoint; 0 where none is written, ``None`` if not known.
        num_kept: checkpoints at once; ``None``: all of them, and how many is not known.
    """

    key: str
    folder: str
    is_writable: bool
    free_bytes: int
    checkpoint_bytes: int | None
    num_kept: int | None


def check_disk(examined: Examined) -> Iterator[Finding]:
    """The run's folder, and that of checkpoints."""
    config = examined.config
    yield from disk_findings(_facts("sluice.run_dir", config.sluice.run_dir, 0, 0))
    saves = config.trainer.save_freq > 0
    size = checkpoint_bytes(config, examined.shape) if saves else 0
    kept = checkpoints_kept(config)
    key = "trainer.default_local_dir" if config.trainer.default_local_dir else "sluice.run_dir"
    yield from disk_findings(_facts(key, checkpoint_folder(config), size, kept))


def disk_findings(facts: DiskFacts) -> Iterator[Finding]:
    """Whether it can be written, and holds what comes."""
    where, free = f"{facts.key} = {facts.folder}", gib(facts.free_bytes)
    one, kept = facts.checkpoint_bytes, facts.num_kept
    move = f"free some, or set {facts.key} to a folder on another disk"
    if not facts.is_writable:
        yield problem(
            f"{where} cannot be written by this user",
            "nothing of the run can be kept",
            f"give the right to it, or set {facts.key} to another folder",
        )
    elif one is None:
        yield warning(
            f"{where}: {free} free; how large a checkpoint is cannot be said",
            "the model's config.json is not here",
            "compare it with 12 bytes a parameter (float32 weights and AdamW's moments)",
        )
    elif one == 0:
        yield _logs(where, facts.free_bytes, move)
    elif facts.free_bytes < one:
        yield problem(
            f"{where}: {free} free, and a checkpoint takes {gib(one)}",
            "the first save fails, and the run with it",
            move,
        )
    elif facts.free_bytes < one * (kept or 2):
        number = "all checkpoints are kept" if kept is None else f"{kept} at once"
        yield warning(
            f"{where}: {free} free, and a checkpoint takes {gib(one)} ({number})",
            "a later save fails, and the run with it",
            f"{move}; or set trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq",
        )
    else:
        yield fine(f"{where}: {free} free, a checkpoint takes {gib(one)}")


def checkpoint_bytes(config: RunConfig, shape: ModelShape | None) -> int | None:
    """Of one: weights and AdamW's moments in the dtype that is trained, twice with a critic."""
    if config.trainer.save_freq <= 0:
        return 0
    if shape is None:
        return None
    width = _BYTES[config.actor_rollout_ref.actor.fsdp_config.model_dtype]
    models = 2 if uses_critic(config) else 1
    return shape.total_parameters * width * (1 + _MOMENTS) * models


def checkpoints_kept(config: RunConfig) -> int | None:
    """Most at one time: one more than are kept, since the oldest goes when the newest is whole."""
    keep, steps = config.trainer.max_actor_ckpt_to_keep, config.trainer.total_training_steps
    saves = None
    if steps is not None and config.trainer.save_freq > 0:
        saves = -(-steps // config.trainer.save_freq)
    if keep is None:
        return saves
    return keep + 1 if saves is None else min(keep + 1, saves)


def _logs(where: str, free_bytes: int, move: str) -> Finding:
    if free_bytes < RUN_BYTES:
        what = f"{where}: {gib(free_bytes)} free"
        return warning(what, "logs, metrics and the ledger of a long run take about 1 GiB", move)
    return fine(f"{where}: {gib(free_bytes)} free")


def _facts(key: str, folder: str, size: int | None, kept: int | None) -> DiskFacts:
    there = nearest_folder(Path(folder))
    free = shutil.disk_usage(there).free
    return DiskFacts(key, folder, os.access(there, os.W_OK | os.X_OK), free, size, kept)


def nearest_folder(path: Path) -> Path:
    """It, or the nearest one above it that is there."""
    absolute = path.absolute()
    return next(one for one in (absolute, *absolute.parents) if one.is_dir())
