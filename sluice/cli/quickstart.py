"""`sluice quickstart`: from nothing to a model that has visibly learned."""

from __future__ import annotations

import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.preparation_view import PreparationView
from sluice.cli.up import ShowLogs, start_run
from sluice.config.checks import check_config
from sluice.config.loader import load_config
from sluice.config.run import RunConfig
from sluice.launch.run_folder import mark_run_folder, remove_results
from sluice.quickstart.prepare import QuickstartAssets, prepare
from sluice.report.html_report import write_report
from sluice.report.summary import summarize, write_summary

_RESULTS = (
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
    task: Annotated[
        str, typer.Option(help="quickstart, stretch (harder), or shapes (pictures).")
    ] = "quickstart",
    seed: Annotated[int, typer.Option(help="Seeds data, model and sampling.")] = 0,
    run_dir: Annotated[Path, typer.Option(help="Folder of everything written.")] = Path(
        "runs/quickstart"
    ),
    logs: ShowLogs = False,
) -> None:
    """Make a tiny model and data set, train it with DAPO by three services, and report.

    Needs no network and no GPU. Writes metrics, checkpoints, summary.json and report.html into
    the run's folder, in place of an earlier quickstart's.

    \b
    Examples:
      sluice quickstart
      sluice quickstart trainer.total_training_steps=20 --seed 1
      sluice quickstart --task shapes --run-dir runs/shapes
    """
    began_s = time.monotonic()
    console = Console()
    _load(overrides or [])  # a mistake is told before anything is made
    mark_run_folder(run_dir)
    with PreparationView(console) as view:
        assets = prepare(run_dir / "assets", task=task, seed=seed, progress=view.show)
    config = _load([*asset_settings(assets, run_dir, seed), *(overrides or [])])
    check_config(config)
    run_dir = Path(config.sluice.run_dir)
    mark_run_folder(run_dir)  # another one, where an override says so
    # A quickstart always starts anew; numbers of an earlier one would mix with its own.
    remove_results(run_dir, _RESULTS)
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
    text = f"{summary.as_text()}\nreport: {run_dir / 'report.html'}"
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _load(overrides: list[str]) -> RunConfig:
    with as_file(files("sluice.quickstart") / "quickstart.yaml") as base:
        return load_config(base, overrides)


def asset_settings(assets: QuickstartAssets, run_dir: Path, seed: int) -> list[str]:
    """Overrides of the job for what was made for it: paths, seeds, the task's lengths."""
    return [
        f"actor_rollout_ref.model.path={assets.model_dir.absolute()}",
        f"data.train_files={assets.train_file.absolute()}",
        f"data.val_files={assets.val_file.absolute()}",
        f"sluice.run_dir={run_dir}",
        f"data.max_prompt_length={assets.task.max_prompt_tokens}",
        f"data.max_response_length={assets.task.max_response_tokens}",
        f"reward.reward_kwargs.overlong_buffer_cfg.len={assets.task.overlong_buffer_tokens}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.seed={seed}",
    ]
