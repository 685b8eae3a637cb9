"""`sluice eval --follow`: each checkpoint of a run, as it appears."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import typer

from sluice.cli.run.evaluation import EvaluationEnd, EvaluationOrder, evaluate_model
from sluice.cli.run.up import Display
from sluice.cli.running_run import is_active
from sluice.cli.terminal import print_json, print_line
from sluice.client.run_address import locate_run
from sluice.config.derived import checkpoint_folder
from sluice.config.run import RunConfig
from sluice.config.schema.data import file_list
from sluice.errors import DataError, SluiceError
from sluice.evaluation.comparison import compared_benchmarks, read_evaluations
from sluice.evaluation.figures import estimate_text
from sluice.evaluation.page import PAGE_NAME, write_page
from sluice.evaluation.results import RESULTS_NAME
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED
from sluice.service_contract import CONFIG_NAME

EVALUATIONS_NAME = "evaluations"
"""In a run's folder: a folder for each evaluated checkpoint."""
_LOOK_EVERY_S = 5.0
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_POLICY = "actor"
EvaluateModel = Callable[[EvaluationOrder, Display], EvaluationEnd]


def follow_run(
    run: Path,
    order: EvaluationOrder,
    display: Display,
    evaluate: EvaluateModel = evaluate_model,
    look_every_s: float = _LOOK_EVERY_S,
) -> None:
    """Evaluate each checkpoint of a run, oldest first, until the run has ended and none is left.

    A page compares all of them; it is written after each. Checkpoints that were evaluated before
    are not evaluated again.

    Args:
        run: its folder.
        order: what to evaluate: its model is replaced by each checkpoint, its output is the folder
            of all evaluations. Without benchmarks these are the run's validation files, and
            without a configuration it is the run's.
        display: where and how to show it.
        evaluate: evaluates one.
        look_every_s: seconds between looks for a new one.

    Raises:
        ConfigError, DataError: nothing was started in the folder, or a checkpoint cannot be
            evaluated.
        typer.Exit: an evaluation did not reach its end; has its exit code.
    """
    location = locate_run(run)
    order = replace(
        order,
        benchmarks=order.benchmarks or _validation_files(location.config),
        config=order.config or location.run_dir / CONFIG_NAME,
    )
    checkpoints = Path(checkpoint_folder(location.config))
    print_line(display.console, f"following {checkpoints}; evaluations: {order.output}")
    try:
        _evaluate_all(location.run_dir, checkpoints, order, display, evaluate, look_every_s)
    except KeyboardInterrupt:
        print_line(display.console, "stopped; the same command continues")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not _evaluated(order.output):
        raise DataError(
            f"{checkpoints}: the run has ended without a checkpoint; set trainer.save_freq"
        )
    print_line(display.console, f"the run has ended; page: {order.output / PAGE_NAME}")


def _evaluate_all(
    run_dir: Path,
    checkpoints: Path,
    order: EvaluationOrder,
    display: Display,
    evaluate: EvaluateModel,
    look_every_s: float,
) -> None:
    while True:
        is_running = asyncio.run(is_active(run_dir))  # first: its last save comes before
        waiting = _unevaluated(checkpoints, order.output)
        for step in waiting[:1]:
            _evaluate_checkpoint(checkpoints, step, order, display, evaluate)
        if not waiting and not is_running:
            break
        if not waiting:
            time.sleep(look_every_s)


def _evaluate_checkpoint(
    checkpoints: Path, step: int, order: EvaluationOrder, display: Display, evaluate: EvaluateModel
) -> None:
    folder, output = checkpoints / _name(step), order.output / _name(step)
    print_line(display.console, f"checkpoint of step {step}")
    end = None
    try:
        end = evaluate(replace(order, model=folder, output=output), display)
    except SluiceError:
        if (folder / _POLICY).is_dir():
            raise
    if end is None or end.results is None:
        if end is None or not (folder / _POLICY).is_dir():
            text = f"{folder} was deleted meanwhile; raise trainer.max_actor_ckpt_to_keep"
            print_line(display.console, text)
            return
        raise typer.Exit(end.exit_code)
    if display.as_json:
        results = msgspec.to_builtins(end.results, str_keys=True)
        print_json({"step": step, "folder": str(output), "results": results})
    evaluations = read_evaluations([order.output / _name(one) for one in _evaluated(order.output)])
    write_page(evaluations, order.output / PAGE_NAME)
    number = [one.folder for one in evaluations].index(output)
    for benchmark in compared_benchmarks(evaluations):
        if (found := benchmark.results[number]) is not None:
            text = f"step {step}, {benchmark.name}: mean {benchmark.variable} "
            text += estimate_text(found.mean)
            if (change := benchmark.differences[number]) is not None:
                text += f", {estimate_text(change, signed=True)} since {evaluations[0].label}"
            print_line(display.console, text)


def _validation_files(config: RunConfig) -> Mapping[str, Path]:
    files = [Path(file) for file in file_list(config.data.val_files or [])]
    if not files:
        raise DataError("data.val_files: the run has none; give --benchmark")
    return {file.stem: file for file in files}


def _unevaluated(checkpoints: Path, output: Path) -> list[int]:
    """Return the steps of the policies without results, in order."""
    done = set(_evaluated(output))
    return [step for step in _steps(checkpoints, _POLICY) if step not in done]


def _evaluated(output: Path) -> list[int]:
    return _steps(output, RESULTS_NAME)


def _steps(folder: Path, content: str) -> list[int]:
    """Return N of each folder ``global_step_N`` with this content, in order."""
    found = ((_CHECKPOINT.fullmatch(path.parent.name)) for path in folder.glob(f"*/{content}"))
    return sorted(int(match[1]) for match in found if match)


def _name(step: int) -> str:
    return f"global_step_{step}"
