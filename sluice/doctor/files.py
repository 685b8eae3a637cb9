"""Check the files of a run: its model, and the disk space for what it writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sluice.config.derived import adapts_experts, checkpoint_folder, uses_adapters, uses_critic
from sluice.config.memory.shape import DTYPE_BYTES, ModelShape
from sluice.config.rules.files import MODEL_KEY, model_problems
from sluice.config.run import RunConfig
from sluice.doctor.finding import (
    GIB,
    DoctorContext,
    Finding,
    fine,
    gib,
    problem,
    problem_of_text,
    warning,
)
from sluice.errors import DataError, MissingPackageError

_POINTER = b"version https://git-lfs"
_INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "copy or download it again"
_NOT_LOADED = "the trainer ends while it loads the weights"
# Logs, metrics, ledger and dumps of samples.
RUN_BYTES = GIB
_STATES = 3  # weights and AdamW's two moments, each as large as the weights


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_model(context: DoctorContext) -> Iterator[Finding]:
    """Check the policy's folder, and the critic's where it starts from another model."""
    config = context.config
    yield from model_findings(MODEL_KEY, config.actor_rollout_ref.model.path)
    critic = config.critic.model.path
    if uses_critic(config) and critic and critic != config.actor_rollout_ref.model.path:
        yield from model_findings("critic.model.path", critic)


def model_findings(key: str, path: str) -> Iterator[Finding]:
    """Yield files that are missing, cut short or left over from another download."""
    why = "trainer and replicas refuse to start"
    problems = list(model_problems(path, key))
    if problems:
        yield from (problem_of_text(defect.text, why) for defect in problems)
        return
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield problem(
            f"{key} = {path!r} holds no *.safetensors",
            "weights are read from these only: other formats can run code",
            "take a checkpoint with safetensors, or save the model again with transformers",
        )
        return
    indexed_files: set[str] = set()
    findings: list[Finding] = []
    try:
        if (folder / _INDEX_FILE).is_file():
            index = msgspec.json.decode((folder / _INDEX_FILE).read_bytes(), type=_Index)
            indexed_files = set(index.weight_map.values())
    except (OSError, msgspec.DecodeError) as error:
        findings.append(problem(f"{key}: {_INDEX_FILE} cannot be read ({error})", why, _AGAIN))
    if missing := sorted(indexed_files - {file.name for file in files}):
        names = f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        statement = f"{key}: {len(missing)} files that {_INDEX_FILE} names are not there: {names}"
        findings.append(problem(statement, _NOT_LOADED, "download the missing files"))
    for file in files:
        try:
            check_complete(key, file)
        except DataError as error:
            findings.append(problem_of_text(str(error), _NOT_LOADED))
        except MissingPackageError as error:  # where services run, the check of packages reports it
            findings.append(
                warning(f"{key}: not read ({error})", "", "pip install 'sluice[torch]'")
            )
            break
    yield from findings
    if not findings:
        size = sum(file.stat().st_size for file in files)
        yield fine(f"{path}: {len(files)} file(s) of weights, {gib(size)}")


def check_complete(key: str, file: Path) -> None:
    """Compare the header of a file of weights with its size; read no tensor.

    Raises:
        DataError: the file is not whole.
        MissingPackageError: safetensors is not installed.
    """
    place = f"{key}: {file.name}"
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise MissingPackageError(str(error)) from error
    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise DataError(f"{place} is a pointer of git-lfs; fetch it with git lfs pull")
    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise DataError(f"{place} is not whole ({error}); {_AGAIN}") from error


def check_disk(context: DoctorContext) -> Iterator[Finding]:
    """Check the run's folder and the checkpoints' folder."""
    config = context.config
    key = "trainer.default_local_dir" if config.trainer.default_local_dir else "sluice.run_dir"
    size = checkpoint_bytes(config, context.shape) if config.trainer.save_freq > 0 else 0
    for name, folder, checkpoint_size, num_kept in (
        ("sluice.run_dir", config.sluice.run_dir, 0, 0),
        (key, checkpoint_folder(config), size, checkpoints_kept(config)),
    ):
        existing = nearest_folder(folder)
        if is_writable(existing):
            yield disk_finding(
                name, folder, shutil.disk_usage(existing).free, checkpoint_size, num_kept
            )
        else:
            yield problem(
                f"{name} = {folder} cannot be written by this user",
                "nothing of the run can be kept",
                f"give the right to it, or set {name} to another folder",
            )


def nearest_folder(folder: str | Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    absolute = Path(folder).absolute()
    return next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())


def is_writable(folder: Path) -> bool:
    """Return whether this user can create files in a folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def disk_finding(
    key: str, folder: str, free_bytes: int, checkpoint_size: int | None, num_kept: int | None
) -> Finding:
    """Judge whether the folder holds what comes.

    Args:
        key: the configuration key that names the folder.
        folder: as named; it need not exist yet.
        free_bytes: of its file system.
        checkpoint_size: bytes of a checkpoint; 0 where none is written, ``None`` if not known.
        num_kept: checkpoints at once; ``None``: all of them, and their number is not known.
    """
    statement = f"{key} = {folder}: {gib(free_bytes)} free"
    move = f"free some, or set {key} to a folder on another disk"
    if checkpoint_size is None:
        return warning(
            f"{statement}; the size of a checkpoint is not known",
            "the model's config.json is not here",
            "compare it with 12 bytes a parameter (float32 weights and AdamW's moments)",
        )
    if checkpoint_size == 0:
        why = "logs, metrics and the ledger of a long run take about 1 GiB"
        return fine(statement) if free_bytes >= RUN_BYTES else warning(statement, why, move)
    number = "all checkpoints are kept" if num_kept is None else f"{num_kept} at once"
    statement = f"{statement}, a checkpoint takes {gib(checkpoint_size)} ({number})"
    if free_bytes < checkpoint_size:
        return problem(statement, "the first save fails, and the run with it", move)
    if free_bytes < checkpoint_size * (num_kept or 2):
        return warning(
            statement,
            "a later save fails, and the run with it",
            f"{move}; or set trainer.max_actor_ckpt_to_keep, or a larger trainer.save_freq",
        )
    return fine(statement)


def checkpoint_bytes(config: RunConfig, shape: ModelShape | None) -> int | None:
    """Return the size of one checkpoint, which has adapters where only they are trained, and the
    whole critic; ``None`` if not known."""
    if shape is None:
        return None
    model, trained = config.actor_rollout_ref.model, shape.total_parameters
    if uses_adapters(model):
        trained = shape.adapter_parameters(model.lora_rank, experts=adapts_experts(model))
    if uses_critic(config):
        trained += shape.total_parameters
    return trained * DTYPE_BYTES[config.actor_rollout_ref.actor.fsdp_config.model_dtype] * _STATES


def checkpoints_kept(config: RunConfig) -> int | None:
    """Return the most at one time; ``None``: all of them, and their number is not known."""
    keep, steps = config.trainer.max_actor_ckpt_to_keep, config.trainer.total_training_steps
    saves = None
    if steps is not None and config.trainer.save_freq > 0:
        saves = -(-steps // config.trainer.save_freq)
    if keep is None:
        return saves
    # The oldest one is removed when the newest is complete.
    return keep + 1 if saves is None else min(keep + 1, saves)
