"""Make the model and the data of a recipe's run in small, once."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.config.loading.override_values import format_override_value
from sluice.errors import ConfigError
from sluice.quickstart.arithmetic import ROW_GROUP_ROWS
from sluice.quickstart.prepare import is_stamped, prepare, write_stamp
from sluice.quickstart.settings import PrepareProgress
from sluice.recipes.folders import Recipe, RecipeAssets

CONTEST_PROBLEMS = 30
CONTEST_SOURCE = "aime_2024_like"

Progress = Callable[[PrepareProgress], None]


def make_files(
    recipe: Recipe, assets: RecipeAssets, folder: Path, seed: int, progress: Progress
) -> list[str]:
    """Make model and data in a folder, or use those that are there; return overrides for them.

    Raises:
        ConfigError: the task is unknown, or the recipe has no such Python file.
    """
    if assets.task.endswith(".py"):
        _make_by_program(recipe.folder / assets.task, folder, seed, progress)
    else:
        prepare(folder, task=assets.task, seed=seed, progress=progress)
    data = folder.absolute() / "data"
    validated = [data / "test.parquet"]
    if assets.contest_copies:
        validated.append(data / "contest.parquet")
        write_contest(validated[0], validated[1], assets.contest_copies)
    return [
        f"actor_rollout_ref.model.path={format_override_value(str(folder.absolute() / 'model'))}",
        f"data.train_files={format_override_value(str(data / 'train.parquet'))}",
        f"data.val_files={format_override_value([str(file) for file in validated])}",
    ]


def write_contest(held_out: Path, file: Path, copies: int) -> None:
    """Write the 30 held-out problems with the most terms, `copies` times, as a source of its own.

    One sample for each row then gives an average over the copies, as in the file of AIME 2024.
    """
    table = pq.read_table(held_out)
    terms = pc.struct_field(table["extra_info"], "num_terms")
    longest = pc.array_sort_indices(terms, order="descending")[:CONTEST_PROBLEMS]
    rows = table.take(longest).to_pylist() * copies
    for row in rows:
        row["data_source"] = CONTEST_SOURCE
    contest = table.slice(0, 0).from_pylist(rows, schema=table.schema)
    pq.write_table(contest, file, row_group_size=ROW_GROUP_ROWS)


def _make_by_program(program: Path, folder: Path, seed: int, progress: Progress) -> None:
    """Call `make(folder, seed)` of a recipe's program, unless it has done the same before."""
    if not program.is_file():
        raise ConfigError(f"made.task: no file {program}; name a task of the quickstart, or a file")
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    stamped = {"program": digest, "seed": seed}
    if is_stamped(folder, stamped):
        progress(PrepareProgress("reused", 1, 1))
        return
    progress(PrepareProgress("data", 1, 1))
    runpy.run_path(str(program))["make"](folder, seed)
    files = sorted(
        path for part in ("model", "data") for path in (folder / part).rglob("*") if path.is_file()
    )
    write_stamp(folder, stamped, files)
