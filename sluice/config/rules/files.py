"""Check that the files and folders a configuration names exist and have the right kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET

from sluice.config.problems import Problem
from sluice.config.rules.security import run_security_problems
from sluice.config.run import RunConfig
from sluice.config.sources import prompt_files

MODEL_KEY = "actor_rollout_ref.model.path"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def file_problems(config: RunConfig) -> list[Problem]:
    """Return all paths that are missing or of the wrong kind, from the working directory."""
    return [
        *model_problems(config.actor_rollout_ref.model.path),
        *_length_problems(config),
        *_data_problems(config),
        *_reward_problems(config),
        *_environment_problems(config),
        *_resume_problems(config),
        *_run_dir_problems(config.sluice.run_dir),
        *run_security_problems(config),
    ]


def model_problems(path: str, key: str = MODEL_KEY) -> Iterator[Problem]:
    """Yield what keeps `path` from being a folder with a Hugging Face model and its tokenizer."""
    folder = Path(path)
    if not path:
        remedy = "set it to the folder of a Hugging Face causal language model"
        yield Problem(key, UNSET, "is empty", remedy)
    elif not folder.is_dir():
        remedy = "give a local one (nothing is downloaded while a run starts)"
        yield Problem(key, path, "is no folder", remedy)
    elif not (folder / "config.json").is_file():
        remedy = "give the folder of a Hugging Face model"
        yield Problem(key, path, "holds no config.json", remedy)
    elif not any((folder / name).is_file() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES)
        remedy = "save the tokenizer beside the model"
        yield Problem(key, path, f"holds no tokenizer ({names})", remedy)


def _length_problems(config: RunConfig) -> Iterator[Problem]:
    has_files = config.data.train_files is not None or config.sluice.sources
    if not has_files and config.trainer.total_training_steps is None:
        yield Problem(
            "trainer.total_training_steps",
            None,
            "with data.train_files = null: the run has no length",
            "set total_training_steps where only clients submit prompts",
        )


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    named = ((key, name) for key, files in prompt_files(config).items() for name in files)
    for key, name in named:
        if not Path(name).is_file():
            yield Problem(key, name, "is no file", "check the path")
        elif not name.endswith((".parquet", ".json", ".jsonl")):
            remedy = "convert it to verl's parquet rows"
            yield Problem(key, name, "does not end in .parquet, .json or .jsonl", remedy)


def _reward_problems(config: RunConfig) -> Iterator[Problem]:
    key, path = "reward.custom_reward_function.path", config.reward.custom_reward_function.path
    if path is None or path.startswith("pkg://"):
        return
    path = path.removeprefix("file://")
    if not Path(path).is_file():
        yield Problem(key, path, "is no file", "check the path")
    elif not path.endswith(".py"):
        yield Problem(key, path, "is no Python file", "name one that ends in .py, or pkg://module")


def _environment_problems(config: RunConfig) -> Iterator[Problem]:
    turns, prefix = config.actor_rollout_ref.rollout.multi_turn, "actor_rollout_ref.rollout"
    for key, path in (
        ("sluice.environment.path", config.sluice.environment.path),
        (f"{prefix}.multi_turn.function_tool_path", turns.function_tool_path),
        (f"{prefix}.multi_turn.tool_config_path", turns.tool_config_path),
    ):
        if path is not None and not Path(path).is_file():
            yield Problem(key, path, "is no file", "check the path")
        elif path is not None and not path.endswith((".py", ".yaml", ".yml")):
            yield Problem(key, path, "is no Python or YAML file", "check the path")


def _resume_problems(config: RunConfig) -> Iterator[Problem]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path and not Path(path).is_dir():
        key = "trainer.resume_from_path"
        yield Problem(key, path, "is no folder", "give a folder global_step_N")


def _run_dir_problems(run_dir: str) -> Iterator[Problem]:
    key = "sluice.run_dir"
    if not run_dir:
        yield Problem(key, UNSET, "is empty", "name a folder for logs, metrics and checkpoints")
    elif Path(run_dir).exists() and not Path(run_dir).is_dir():
        yield Problem(key, run_dir, "is a file", "name a folder")
