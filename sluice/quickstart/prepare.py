"""Make the files that the quickstart trains on, once: tokenizer, data and warm-started model.

A stamp records their settings and digests. A folder whose stamp matches is used as it is, without
importing torch; otherwise all files are made again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.errors import ConfigError
from sluice.quickstart.arithmetic import (
    TASKS,
    Dialogue,
    Task,
    deal_problems,
    make_dialogues,
    split_problems,
    write_dataset,
)
from sluice.quickstart.jars import JARS, make_jars
from sluice.quickstart.lessons import lesson_of, save_taught
from sluice.quickstart.settings import (
    JARS_SETTINGS,
    PrepareProgress,
    PrepareSettings,
    QuickstartTask,
)
from sluice.quickstart.tokenizer import train_tokenizer
from sluice.whole_file import write_whole

# Increase it when the same settings give other files: existing folders are then made again.
FORMAT_VERSION = 3
STAMP_NAME = "prepared.json"
_SIZES = {JARS.name: JARS_SETTINGS}


@dataclass(frozen=True, slots=True)
class QuickstartAssets:
    """The quickstart's files. `model_dir` holds model and tokenizer."""

    task: QuickstartTask
    model_dir: Path
    train_file: Path
    val_file: Path


def prepare(
    directory: Path,
    *,
    task: str,
    seed: int,
    progress: Callable[[PrepareProgress], None],
    settings: PrepareSettings | None = None,
) -> QuickstartAssets:
    """Make model and data set in `directory`, or use the present ones.

    Raises:
        ConfigError: the task is unknown, or the sizes do not fit its problem space.
    """
    chosen_task = _find_task(task)
    assets = QuickstartAssets(
        chosen_task,
        directory / "model",
        directory / "data" / "train.parquet",
        directory / "data" / "test.parquet",
    )
    sizes = settings or _SIZES.get(task, PrepareSettings())
    stamped = {"format": FORMAT_VERSION, "task": asdict(chosen_task), "seed": seed, **asdict(sizes)}
    if is_stamped(directory, stamped):
        progress(PrepareProgress("reused", 1, 1))
        return assets
    (directory / STAMP_NAME).unlink(missing_ok=True)  # before a stamped file changes
    if isinstance(chosen_task, Task):
        _make(directory, chosen_task, seed, sizes, progress)
    else:
        make_jars(directory, seed, sizes, progress)
    files = sorted(path for path in assets.model_dir.iterdir() if path.is_file())
    write_stamp(directory, stamped, [*files, assets.train_file, assets.val_file])
    return assets


def write_stamp(directory: Path, settings: dict[str, Any], files: Iterable[Path]) -> None:
    """Record the settings, and a digest of each file."""
    stamp = {
        "settings": settings,
        "files": {str(path.relative_to(directory)): _file_digest(path) for path in files},
    }
    write_whole(directory / STAMP_NAME, (json.dumps(stamp, indent=2) + "\n").encode())


def is_stamped(directory: Path, settings: dict[str, Any]) -> bool:
    """Return whether a folder's stamp is of these settings, and its files are those of the stamp.

    An unreadable stamp counts as none.
    """
    try:
        stamp = json.loads((directory / STAMP_NAME).read_text(encoding="utf-8"))
        if stamp["settings"] != json.loads(json.dumps(settings)):  # tuples are lists there
            return False
        files = stamp["files"].items()
        return all(_file_digest(directory / name) == digest for name, digest in files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _find_task(name: str) -> QuickstartTask:
    tasks: dict[str, QuickstartTask] = {**TASKS, JARS.name: JARS}
    if name not in tasks:
        raise ConfigError(f"task: {name!r} is unknown; choose one of {', '.join(tasks)}")
    return tasks[name]


def _make(
    directory: Path,
    task: Task,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> None:
    split = split_problems(task, seed, sizes.num_train, sizes.num_held_out)
    write_dataset(directory / "data" / "train.parquet", split.train, "train")
    write_dataset(directory / "data" / "test.parquet", split.held_out, "test")
    held_out_numbers = {problem.numbers for problem in split.held_out}
    wrong_step_rate = sizes.warm_start.wrong_step_rate

    def dialogues(purpose: str) -> Iterator[Dialogue]:
        """Yield dialogues without end, from a separate random stream, without held-out numbers."""
        stream = f"{seed}/{purpose}"
        problems = deal_problems(random.Random(stream), task, held_out_numbers)
        return make_dialogues(problems, random.Random(f"{stream}/slips"), wrong_step_rate)

    tokenizer = train_tokenizer(islice(dialogues("tokenizer"), sizes.num_tokenizer_dialogues))
    progress(PrepareProgress("data", 1, 1))
    # Imported here, because present files need no torch.
    from sluice.quickstart.model import make_model, slip_entropy

    entropy = slip_entropy(wrong_step_rate)
    lessons = (lesson_of(dialogue, entropy) for dialogue in dialogues("warm-start"))
    model = make_model(tokenizer, seed, task.num_experts, task.family)
    save_taught(directory / "model", model, tokenizer, lessons, sizes.warm_start, progress)
