"""`sluice quickstart`: from nothing to a model that has visibly learned."""

from __future__ import annotations

import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.cli.up import start_run
from sluice.config.loader import load_config
from sluice.quickstart.prepare import PrepareProgress, QuickstartAssets, prepare
from sluice.report.html_report import write_report
from sluice.report.summary import summarize, write_summary


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys to override in verl's spelling.",
            show_default=False,
        ),
    ] = None,
    *,
    task: Annotated[str, typer.Option(help="quickstart, or stretch (harder).")] = "quickstart",
    seed: Annotated[int, typer.Option(help="Seeds data, model and sampling.")] = 0,
    run_dir: Annotated[Path, typer.Option(help="Folder of everything written.")] = Path(
        "runs/quickstart"
    ),
    logs: Annotated[bool, typer.Option(help="Show all log lines of the services.")] = False,
) -> None:
    """Make a tiny model and data set, train it with DAPO by three services, and report.

    Needs no network and no GPU. Writes metrics, checkpoints, summary.json and report.html into
    the run's folder.

    Examples:

      sluice quickstart

      sluice quickstart trainer.total_training_steps=20 sluice.rollout.replicas=1 --seed 1
    """
    began_s = time.monotonic()
    console = Console()
    assets = _prepare(console, run_dir / "assets", task, seed)
    _remove_old_results(run_dir)
    with as_file(files("sluice.quickstart") / "quickstart.yaml") as base:
        config = load_config(base, [*_paths(assets, run_dir, seed), *(overrides or [])])
    training_from_s = time.monotonic()
    end = start_run(config, console, logs=logs)
    if end.exit_code != 0:
        raise typer.Exit(end.exit_code)
    now_s = time.monotonic()
    summary = summarize(
        run_dir, seconds_total=now_s - began_s, seconds_services=now_s - training_from_s
    )
    write_summary(summary, run_dir / "summary.json")
    write_report(run_dir, summary, run_dir / "report.html")
    console.print(summary.as_text())
    console.print(f"report: {run_dir / 'report.html'}")


def _prepare(console: Console, folder: Path, task: str, seed: int) -> QuickstartAssets:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("making data and tokenizer", total=1)

        def show(progress: PrepareProgress) -> None:
            if progress.stage == "reused":
                bars.update(bar, description="model and data are there", completed=1)
            elif progress.stage == "warm-start":
                loss = "" if progress.loss is None else f" (loss {progress.loss:.3f})"
                bars.update(
                    bar,
                    description=f"supervised warm start{loss}",
                    total=progress.total,
                    completed=progress.done,
                )

        return prepare(folder, task=task, seed=seed, progress=show)


def _paths(assets: QuickstartAssets, run_dir: Path, seed: int) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={assets.model_dir.absolute()}",
        f"data.train_files={assets.train_file.absolute()}",
        f"data.val_files={assets.val_file.absolute()}",
        f"sluice.run_dir={run_dir.absolute()}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.seed={seed}",
    ]


def _remove_old_results(run_dir: Path) -> None:
    """A quickstart always starts anew; numbers of an earlier one would mix with its own."""
    for name in ("metrics.jsonl", "accounts.json", "summary.json", "report.html"):
        (run_dir / name).unlink(missing_ok=True)
