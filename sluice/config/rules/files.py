"""Check a run's folders and its model's; `sluice.doctor` reads the other files of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET

from sluice.config.problems import Problem
from sluice.config.run import RunConfig

MODEL_KEY = "actor_rollout_ref.model.path"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def file_problems(config: RunConfig) -> list[Problem]:
    """Return what is wrong with the run's folders and length, from the working directory.

    The checks of `sluice.doctor` report the other files, which they read.
    """
    return [
        *_length_problems(config),
        *_resume_problems(config),
        *_run_dir_problems(config.sluice.run_dir),
    ]


def model_problems(path: str, key: str = MODEL_KEY) -> Iterator[Problem]:
    """Yield what keeps `path` from being a folder with a Hugging Face model and its tokenizer."""
    folder = Path(path)
    if not path:
        remedy = "set it to the folder of a Hugging Face causal language model"
        yield Problem(key, UNSET, "is empty", remedy)
    elif not folder.is_dir():
        remedy = "give a local one (nothing is downloaded while a run starts)"
        if _HUB_NAME.fullmatch(path):
            remedy += f", as from `hf download {path} --local-dir DIR`"
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
