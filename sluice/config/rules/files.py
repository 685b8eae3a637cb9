"""Check that the files and folders a configuration names exist and have the right kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sluice.config.rules.security import run_security_problems
from sluice.config.run import RunConfig

MODEL_KEY = "actor_rollout_ref.model.path"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def file_problems(config: RunConfig) -> list[str]:
    """All paths that are missing or of the wrong kind, relative to the working directory."""
    return [
        *model_problems(config.actor_rollout_ref.model.path),
        *_length_problems(config),
        *_data_problems("data.train_files", config.data.train_files),
        *_data_problems("data.val_files", config.data.val_files),
        *_reward_problems(config),
        *_resume_problems(config),
        *_run_dir_problems(config.sluice.run_dir),
        *run_security_problems(config),
    ]


def model_problems(path: str) -> Iterator[str]:
    """Whether `path` is a folder with a Hugging Face model's configuration and tokenizer."""
    folder = Path(path)
    if not path:
        yield f"{MODEL_KEY} is empty; set it to the folder of a Hugging Face causal language model"
    elif not folder.is_dir():
        yield (
            f"{MODEL_KEY} = {path!r} is no folder; give a local one (nothing is downloaded while "
            "a run starts)"
        )
    elif not (folder / "config.json").is_file():
        yield f"{MODEL_KEY} = {path!r} holds no config.json, so it is no Hugging Face model"
    elif not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield (
            f"{MODEL_KEY} = {path!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); save the "
            "tokenizer beside the model"
        )


def _length_problems(config: RunConfig) -> Iterator[str]:
    if config.data.train_files is None and config.trainer.total_training_steps is None:
        yield (
            "data.train_files and trainer.total_training_steps are both null, so the run has no "
            "length; set total_training_steps where only clients submit prompts"
        )


def _data_problems(key: str, files: str | list[str] | None) -> Iterator[str]:
    for name in [files] if isinstance(files, str) else files or []:
        if not Path(name).is_file():
            yield f"{key}: {name!r} is no file; check the path"
        elif not name.endswith(".parquet"):
            yield f"{key}: {name!r} does not end in .parquet; convert it to verl's parquet rows"


def _reward_problems(config: RunConfig) -> Iterator[str]:
    path = config.reward.custom_reward_function.path
    if path is None or path.startswith("pkg://"):
        return
    path = path.removeprefix("file://")
    if not Path(path).is_file():
        yield f"reward.custom_reward_function.path = {path!r} is no file; check the path"
    elif not path.endswith(".py"):
        yield f"reward.custom_reward_function.path = {path!r} is no Python file"


def _resume_problems(config: RunConfig) -> Iterator[str]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path and not Path(path).is_dir():
        yield f"trainer.resume_from_path = {path!r} is no folder; give a folder global_step_N"


def _run_dir_problems(run_dir: str) -> Iterator[str]:
    if not run_dir:
        yield "sluice.run_dir is empty; name a folder for logs, metrics and checkpoints"
    elif Path(run_dir).exists() and not Path(run_dir).is_dir():
        yield f"sluice.run_dir = {run_dir!r} is a file; name a folder"
