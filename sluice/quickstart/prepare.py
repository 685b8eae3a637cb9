"""Make the files that the quickstart trains on, once: tokenizer, data and warm-started model.

A stamp records their settings and digests. A folder whose stamp matches is used as it is, without
importing torch; otherwise all files are made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from sluice.quickstart.jars import JARS, JarsTask
from sluice.quickstart.settings import (
    JARS_SETTINGS,
    SHAPES_SETTINGS,
    PrepareProgress,
    PrepareSettings,
    QuickstartFacts,
)
from sluice.quickstart.shapes import SHAPES, ShapesTask
from sluice.quickstart.tokenizer import encode_dialogue, save_tokenizer, train_tokenizer
from sluice.whole_file import write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sluice.quickstart.model import WarmStartResult

logger = logging.getLogger(__name__)

AnyTask = Task | ShapesTask | JarsTask

# Increase it when the same settings give other files: existing folders are then made again.
FORMAT_VERSION = 2
STAMP_NAME = "prepared.json"
_SIZES = {SHAPES.name: SHAPES_SETTINGS, JARS.name: JARS_SETTINGS}


@dataclass(frozen=True, slots=True)
class QuickstartAssets:
    """The quickstart's files. `model_dir` holds model and tokenizer."""

    task: AnyTask
    model_dir: Path
    train_file: Path
    val_file: Path
    facts: QuickstartFacts
    reused: bool


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
    chosen = _task_named(task)
    sizes = settings or _SIZES.get(task, PrepareSettings())
    stamped = {"format": FORMAT_VERSION, "task": asdict(chosen), "seed": seed, **asdict(sizes)}
    found = read_facts(directory, stamped)
    if found is not None:
        progress(PrepareProgress("reused", 1, 1))
        return _assets(directory, chosen, QuickstartFacts(**found), reused=True)
    (directory / STAMP_NAME).unlink(missing_ok=True)  # before a stamped file changes
    if isinstance(chosen, ShapesTask):
        from sluice.quickstart.prepare_shapes import make_shapes  # needs Pillow

        facts = make_shapes(directory, seed, sizes, progress)
    elif isinstance(chosen, JarsTask):
        from sluice.quickstart.prepare_jars import make_jars

        facts = make_jars(directory, seed, sizes, progress)
    else:
        facts = _make(directory, chosen, seed, sizes, progress)
    assets = _assets(directory, chosen, facts, reused=False)
    files = sorted(path for path in assets.model_dir.iterdir() if path.is_file())
    write_stamp(directory, stamped, [*files, assets.train_file, assets.val_file], asdict(facts))
    logger.info("made quickstart files in %s in %.1f s", directory, facts.seconds)
    return assets


def write_stamp(
    directory: Path, settings: dict[str, Any], files: Iterable[Path], facts: dict[str, Any]
) -> None:
    """Record the settings, a digest of each file, and the facts about them."""
    stamp = {
        "settings": settings,
        "files": {str(path.relative_to(directory)): _file_digest(path) for path in files},
        "facts": facts,
    }
    write_whole(directory / STAMP_NAME, (json.dumps(stamp, indent=2) + "\n").encode())


def read_facts(directory: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recorded facts; ``None`` if a file or the settings differ from the stamp's."""
    try:
        stamp = json.loads((directory / STAMP_NAME).read_text(encoding="utf-8"))
        if stamp["settings"] != json.loads(json.dumps(settings)):  # tuples are lists there
            return None
        for name, digest in stamp["files"].items():
            if _file_digest(directory / name) != digest:
                return None
        facts: dict[str, Any] = stamp["facts"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # An unreadable stamp counts as none: the files are made again.
        return None
    return facts


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _task_named(name: str) -> AnyTask:
    known: dict[str, AnyTask] = {**TASKS, SHAPES.name: SHAPES, JARS.name: JARS}
    if name not in known:
        raise ConfigError(f"task: {name!r} is unknown; choose one of {', '.join(known)}")
    return known[name]


def _assets(
    directory: Path, task: AnyTask, facts: QuickstartFacts, *, reused: bool
) -> QuickstartAssets:
    return QuickstartAssets(
        task=task,
        model_dir=directory / "model",
        train_file=directory / "data" / "train.parquet",
        val_file=directory / "data" / "test.parquet",
        facts=facts,
        reused=reused,
    )


def _make(
    directory: Path,
    task: Task,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> QuickstartFacts:
    started = time.monotonic()
    split = split_problems(task, seed, sizes.num_train, sizes.num_held_out)
    write_dataset(directory / "data" / "train.parquet", split.train, "train")
    write_dataset(directory / "data" / "test.parquet", split.held_out, "test")
    held_out_numbers = {problem.numbers for problem in split.held_out}

    def dialogues(purpose: str) -> Iterator[Dialogue]:
        """Yield dialogues without end, from a separate random stream, without held-out numbers."""
        stream = f"{seed}/{purpose}"
        problems = deal_problems(random.Random(stream), task, held_out_numbers)
        slips = random.Random(f"{stream}/slips")
        return make_dialogues(problems, slips, sizes.warm_start.wrong_step_rate)

    samples = list(islice(dialogues("tokenizer"), sizes.num_tokenizer_dialogues))
    tokenizer = train_tokenizer(samples)
    encoded = [encode_dialogue(tokenizer, sample) for sample in samples]
    progress(PrepareProgress("data", 1, 1))
    num_parameters, result = _make_model(
        directory / "model", task, tokenizer, dialogues("warm-start"), sizes, seed, progress
    )
    return QuickstartFacts(
        num_parameters=num_parameters,
        vocabulary_size=tokenizer.get_vocab_size(),
        num_train=len(split.train),
        num_held_out=len(split.held_out),
        longest_prompt_tokens=max(len(prompt) for prompt, _ in encoded),
        longest_answer_tokens=max(len(answer) for _, answer in encoded),
        warm_start_steps=result.num_steps,
        warm_start_excess_loss=result.excess_loss,
        seconds=time.monotonic() - started,
    )


def _make_model(
    directory: Path,
    task: Task,
    tokenizer: Tokenizer,
    dialogues: Iterator[Dialogue],
    sizes: PrepareSettings,
    seed: int,
    progress: Callable[[PrepareProgress], None],
) -> tuple[int, WarmStartResult]:
    """Write the warm-started model with its tokenizer; return parameter count and result."""
    # Imported here, because present files need no torch.
    from sluice.quickstart.model import (
        MAX_POSITIONS,
        make_model,
        one_torch_thread,
        save_model,
        warm_start,
    )

    def report(step: int, total: int, loss: float) -> None:
        progress(PrepareProgress("warm-start", step, total, loss))

    model = make_model(tokenizer, seed, task.num_experts, task.family)
    with one_torch_thread():
        result = warm_start(model, tokenizer, dialogues, sizes.warm_start, report)
    shutil.rmtree(directory, ignore_errors=True)
    save_model(model, directory)
    save_tokenizer(tokenizer, directory, MAX_POSITIONS)
    return model.num_parameters(), result
