"""`sluice quickstart`: make a model and data, train, and report the result."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from sluice.cli.arguments import AsJson, Overrides
from sluice.cli.run.checked import check_run, refuse_beside_another, require_writable
from sluice.cli.run.up import Display, Quiet, ShowLogs, display_from_options, start_run
from sluice.cli.running_run import folder_setting
from sluice.cli.terminal import progress_bars
from sluice.config.loading.loader import load_config, read_run
from sluice.config.loading.override_values import format_override_value
from sluice.errors import ConfigError
from sluice.launch.device_plan import local_devices
from sluice.quickstart.settings import PrepareProgress
from sluice.service_contract import TRACKER_NAME

if TYPE_CHECKING:
    from sluice.quickstart.prepare import QuickstartAssets


MARKER = ".sluice-run"
_MARKER_TEXT = "Made by sluice, which replaces the results in this folder at its next start here.\n"
_RESULTS = (
    f"checkpoints/{TRACKER_NAME}",
    "metrics.jsonl",
    "accounts.json",
    "summary.json",
    "report.html",
    "validation/*.jsonl",
    "tensorboard/events.out.tfevents.*",
    "logs/*.log",
    "groups.jsonl",
    "traces.jsonl",
    "samples/*.jsonl",
    "reward/ledger.sqlite*",
    "reward/prompt_memory.sqlite*",
)
_LINE_EVERY_S = 5.0


def quickstart(
    overrides: Overrides = None,
    *,
    task: Annotated[
        str,
        typer.Option(
            help="quickstart, stretch (harder), experts (sparse model), qwen2, or jars (a tool)."
        ),
    ] = "quickstart",
    seed: Annotated[int, typer.Option(help="Seed of data, model and sampling.")] = 0,
    run_dir: Annotated[
        Path, typer.Option("--run", "--run-dir", help="Folder for all files.")
    ] = Path("runs/quickstart"),
    logs: ShowLogs = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make a tiny model and data set, train it with DAPO by three services, and report.

    Needs no network and no GPU. Writes metrics, checkpoints, summary.json and report.html into
    the run's folder, in place of an earlier quickstart's.

    \b
    Examples:
      sluice quickstart
      sluice quickstart trainer.total_training_steps=20 --seed 1
      sluice quickstart --task jars --run-dir runs/jars
    """
    began_s = time.monotonic()
    display = display_from_options(logs=logs, quiet=quiet, as_json=as_json)
    with _job_file() as base:
        load_config(base, overrides or [])  # reports mistakes before anything is made
    mark_run_folder(run_dir)
    settings = [*make_asset_settings(run_dir, task, seed, display.console), *(overrides or [])]
    with _job_file() as base:
        start_at_zero(base, with_fitting_replicas(base, settings), display, began_s)


def start_at_zero(base: Path, settings: list[str], display: Display, began_s: float) -> NoReturn:
    """Run what made model and data, in place of an earlier run of the folder; exit with its code.

    It always starts at step 0: results of an earlier run would mix with its own.

    Args:
        base: YAML file.
        settings: its overrides.
        display: where and how to show it.
        began_s: start of the whole command, on the monotonic clock.

    Raises:
        ConfigError: of `check_run`; or the run's folder is not marked.
    """
    config = check_run(base, settings, display.console).config
    run_dir = Path(config.sluice.run_dir)
    mark_run_folder(run_dir)  # an override may name another one
    remove_results(run_dir, _RESULTS)
    end = start_run(config, display, began_s=began_s)
    raise typer.Exit(end.exit_code)


def make_asset_settings(run_dir: Path, task: str, seed: int, console: Console) -> list[str]:
    """Make model and data in a run's folder; return the overrides for them.

    Raises:
        ConfigError: the task is unknown, or its packages are not installed.
    """
    with show_preparation(console) as show:
        assets = asset_maker()(run_dir / "assets", task=task, seed=seed, progress=show)
    return asset_settings(assets, run_dir, seed)


def asset_maker() -> Callable[..., QuickstartAssets]:
    """Return what makes model and data.

    Raises:
        ConfigError: its packages are not installed.
    """
    try:
        from sluice.quickstart.prepare import prepare
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the quickstart needs PyTorch and transformers, and {error.name} is not installed; "
            "pip install 'sluice[torch]'"
        ) from error
    return prepare


def asset_settings(assets: QuickstartAssets, run_dir: Path, seed: int) -> list[str]:
    """Return overrides for the paths, the seeds and the lengths of the quickstart's files."""
    return [
        f"actor_rollout_ref.model.path={format_override_value(str(assets.model_dir.absolute()))}",
        f"data.train_files={format_override_value(str(assets.train_file.absolute()))}",
        f"data.val_files={format_override_value(str(assets.val_file.absolute()))}",
        folder_setting(run_dir),
        f"data.max_prompt_length={assets.task.max_prompt_tokens}",
        f"data.max_response_length={assets.task.max_response_tokens}",
        f"reward.reward_kwargs.overlong_buffer_cfg.len={assets.task.overlong_buffer_tokens}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.seed={seed}",
        *assets.task.overrides,
    ]


def with_fitting_replicas(base: Path, settings: list[str]) -> list[str]:
    """Return the settings; before them as many replicas as this machine's devices allow."""
    run = read_run(base, settings)
    return [*local_devices(run.config, run.keys, os.environ).remedy, *settings]


def _job_file() -> AbstractContextManager[Path]:
    return as_file(files("sluice.quickstart") / "quickstart.yaml")


def mark_run_folder(folder: Path) -> None:
    """Mark a missing, empty or marked folder as one whose results may be replaced.

    Raises:
        ConfigError: it holds files that sluice did not put there, is not a folder, cannot be
            written, or a run is active in it.
    """
    asyncio.run(refuse_beside_another(folder.absolute()))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run folder {folder}: is a file; give another folder")
    require_writable(folder, "run folder")
    if not (folder / MARKER).is_file():
        if folder.is_dir() and (name := min((file.name for file in folder.iterdir()), default="")):
            raise ConfigError(
                f"run folder {folder}: holds {name!r} and no {MARKER}, so sluice did not make it "
                "and will not replace results in it; give a folder that is empty or does not "
                "exist, or delete this one"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(_MARKER_TEXT, encoding="utf-8")


def remove_results(folder: Path, patterns: Iterable[str]) -> None:
    """Delete files of a marked folder. Links are deleted, never followed.

    Args:
        folder: the run's folder.
        patterns: globs relative to it.

    Raises:
        ConfigError: the folder is not marked.
    """
    if not (folder / MARKER).is_file():
        raise ConfigError(f"run folder {folder}: holds no {MARKER}; nothing is deleted there")
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


@contextmanager
def show_preparation(
    console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[PrepareProgress], None]]:
    """Show the progress of the preparation: a bar on a terminal, else a line every few seconds.

    Args:
        console: where to show it.
        clock: seconds, monotonic.
    """
    next_line_s = clock()
    with progress_bars(console) as bars:
        bar = bars.add_task("making data and tokenizer", total=None)

        def show(progress: PrepareProgress) -> None:
            nonlocal next_line_s
            text = _progress_text(progress)
            if progress.stage != "data":
                bars.update(bar, description=text, total=progress.total, completed=progress.done)
            is_last = progress.done == progress.total
            if not console.is_terminal and (is_last or clock() >= next_line_s):
                next_line_s = clock() + _LINE_EVERY_S
                console.print(f"{text}: {progress.done}/{progress.total}", soft_wrap=True)

        yield show


def _progress_text(progress: PrepareProgress) -> str:
    match progress.stage:
        case "reused":
            return "model and data are there"
        case "data":
            return "making data and tokenizer"
        case _:
            loss = "" if progress.loss is None else f" (loss {progress.loss:.3f})"
            return f"supervised warm start{loss}"
