"""`sluice eval regrade`: the stored responses of an evaluation through its scorers again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Annotated

import msgspec
import typer

from sluice.cli.arguments import AsJson, complete_setting
from sluice.cli.run.checked import refuse_beside_another
from sluice.cli.run.evaluation_origin import regraded_origin, write_origin
from sluice.cli.terminal import counted, print_json
from sluice.concurrency.process import SUPERVISOR_VARIABLE, ending_text
from sluice.errors import ConfigError, DataError
from sluice.evaluation.page import PAGE_NAME, write_report
from sluice.evaluation.results import RESULTS_NAME, Results, read_results, write_results
from sluice.evaluation.statistics import estimate_text
from sluice.safe_text import printable
from sluice.service_contract import CONFIG_NAME

_COMMAND = "services.reward.regrade"


def regrade(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="--output folder of an evaluation.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys to override, such as reward.custom_reward_function.path=other.py.",
            show_default=False,
            autocompletion=complete_setting,
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Grade the stored responses of an evaluation again: nothing is sampled.

    The scorers are those of the evaluation's configuration, in processes with its limits; override
    keys to try others. What an environment graded stays as it is. results.json and the page are
    written again. Each response keeps its earlier grades, and the former results stay as
    results-1.json, results-2.json and so on. An evaluation that failed is graded again, too; its
    command then finishes it.

    \b
    Examples:
      sluice eval regrade runs/base-eval
      sluice eval regrade runs/base-eval reward.custom_reward_function.path=other.py
    """
    if not (folder / CONFIG_NAME).is_file():
        raise DataError(
            f"{folder}: holds no {CONFIG_NAME}; give the --output folder of an evaluation"
        )
    asyncio.run(refuse_beside_another(folder))
    before = read_results(folder) if (folder / RESULTS_NAME).is_file() else None
    origin = regraded_origin(folder, settings or [])
    total = None if before is None else sum(one.prompts for one in before.benchmarks.values())
    _grade(folder, settings or [], total)
    if origin is not None:
        write_origin(folder, origin)
    if before is None:
        _say_unfinished(as_json=as_json)
        return
    kept = _keep(folder)
    now = write_results(folder, before)
    write_report(folder)
    if as_json:
        before_and_now = {"before": before, "now": now}
        print_json(msgspec.to_builtins(before_and_now, str_keys=True) | {"former": str(kept)})
        return
    _print(before, now)
    typer.echo(f"results: {folder / RESULTS_NAME} (former ones: {kept.name})")
    typer.echo(f"page: {folder / PAGE_NAME}")


def _say_unfinished(*, as_json: bool) -> None:
    if as_json:
        print_json({"before": None, "now": None, "former": None})
    else:
        typer.echo("graded again; the evaluation's command, with these keys, finishes it")


def _grade(folder: Path, settings: Sequence[str], num_prompts: int | None) -> None:
    """Run the reward service's code in a process that ends with this one, and count its prompts.

    Raises:
        ConfigError: it failed; it has printed why.
    """
    command = [sys.executable, "-m", _COMMAND, str(folder), *settings]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    with (
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process,
        counted("prompts graded again", num_prompts) as advance,
    ):
        try:
            for line in process.stdout or ():
                advance(int(line))
        except BaseException:
            process.kill()
            raise
    if process.returncode > 0:
        raise typer.Exit(process.returncode)
    if process.returncode < 0:
        raise ConfigError(
            f"grading {folder}: its process ended with {ending_text(process.returncode)}; look "
            "whether this machine has the memory for it, and try again"
        )


def _keep(folder: Path) -> Path:
    """Keep the former results under the next free name."""
    former, number = folder / RESULTS_NAME, 1
    while (kept := folder / f"results-{number}.json").exists():
        number += 1
    copyfile(former, kept)
    return kept


def _print(before: Results, now: Results) -> None:
    for name, found in now.benchmarks.items():
        old = before.benchmarks.get(name)
        text = f"{name}: mean {found.variable} {estimate_text(found.mean)}"
        if old is not None:
            text += f", before {estimate_text(old.mean)}"
        failed = found.failed_samples
        typer.echo(printable(text + (f"; {failed} without a grade" if failed else "")))
