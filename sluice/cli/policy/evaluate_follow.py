"""`sluice eval --follow`: each checkpoint of a run, as it appears."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import typer

from sluice.cli.policy.kept_checkpoints import KeptCheckpoints
from sluice.cli.run.evaluation import EvaluationOrder, evaluate_model, evaluation_config
from sluice.cli.run.evaluation_origin import refuse_other_origin
from sluice.cli.run.up import Display
from sluice.cli.running_run import is_active
from sluice.cli.terminal import print_json, print_line
from sluice.client.run_address import locate_run
from sluice.config.derived import adapts, checkpoint_folder
from sluice.config.run import RunConfig
from sluice.config.schema.data import file_list
from sluice.data.benchmarks import files_by_name
from sluice.errors import ConfigError, DataError, SluiceError
from sluice.evaluation.comparison import Evaluation, compared_benchmarks, read_evaluations
from sluice.evaluation.page import PAGE_NAME, write_page, write_report
from sluice.evaluation.results import Results, read_results, write_results
from sluice.evaluation.statistics import estimate_text
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED
from sluice.service_contract import CONFIG_NAME

EVALUATIONS_NAME = "evaluations"
"""In a run's folder: a folder for each evaluated checkpoint."""
_LOOK_EVERY_S = 2.0
_NO_MODEL = Path(os.devnull)  # checkpoints differ; all else is compared
EvaluateModel = Callable[[EvaluationOrder, Display], Results]


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
        ConfigError, DataError: nothing was started in the folder, the run trains adapters, a
            checkpoint cannot be evaluated, or others were evaluated with other settings.
        typer.Exit: an evaluation did not reach its end; has its exit code.
    """
    location = locate_run(run)
    _refuse_adapters(run, location.config)
    order = replace(
        order,
        benchmarks=order.benchmarks or _validation_files(location.config),
        config=order.config or location.run_dir / CONFIG_NAME,
    )
    folder = Path(checkpoint_folder(location.config))
    checkpoints = KeptCheckpoints(folder, order.output)
    for step in checkpoints.evaluated():
        any_model = replace(order, model=_NO_MODEL)
        refuse_other_origin(checkpoints.evaluation(step), evaluation_config(any_model))
        if checkpoints.is_kept(step):
            _finish(checkpoints, step)
    print_line(display.console, f"following {folder}; evaluations: {order.output}")
    try:
        with checkpoints.watching(look_every_s):
            while True:
                is_running = asyncio.run(is_active(location.run_dir))
                checkpoints.look()  # after that: the run's last save comes before its end
                if waiting := checkpoints.waiting():
                    _evaluate_checkpoint(checkpoints, waiting[0], order, display, evaluate)
                elif is_running:
                    time.sleep(look_every_s)
                else:
                    break
    except KeyboardInterrupt:
        print_line(display.console, "stopped; the same command continues")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not _compare(checkpoints, order):
        raise DataError(f"{folder}: the run has ended without a checkpoint; set trainer.save_freq")
    print_line(display.console, f"the run has ended; page: {order.output / PAGE_NAME}")


def _refuse_adapters(run: Path, config: RunConfig) -> None:
    if adapts(config.actor_rollout_ref.model):
        raise ConfigError(
            f"--follow {run}: the run trains adapters (actor_rollout_ref.model.lora_rank), and its "
            "checkpoints have no whole weights; for each, sluice merge global_step_N OUTPUT, then "
            "sluice eval --model OUTPUT"
        )


def _evaluate_checkpoint(
    checkpoints: KeptCheckpoints,
    step: int,
    order: EvaluationOrder,
    display: Display,
    evaluate: EvaluateModel,
) -> None:
    output = checkpoints.evaluation(step)
    print_line(display.console, f"checkpoint of step {step}")
    try:
        evaluate(replace(order, model=checkpoints.model(step), output=output), display)
    except (SluiceError, typer.Exit):
        if checkpoints.is_there(step):
            raise
        folder = checkpoints.checkpoint(step)
        text = f"{folder} was deleted meanwhile; raise trainer.max_actor_ckpt_to_keep"
        print_line(display.console, text)
        return
    results = _finish(checkpoints, step)
    if display.as_json:
        numbers = msgspec.to_builtins(results, str_keys=True)
        print_json({"step": step, "folder": str(output), "results": numbers})
    _print_progress(step, output, _compare(checkpoints, order), display)


def _finish(checkpoints: KeptCheckpoints, step: int) -> Results:
    """Name the run's checkpoint in the results of an evaluation, and delete the kept one."""
    output = checkpoints.evaluation(step)
    named = msgspec.structs.replace(read_results(output), model=str(checkpoints.checkpoint(step)))
    results = write_results(output, named)
    write_report(output)
    checkpoints.release(step)
    return results


def _compare(checkpoints: KeptCheckpoints, order: EvaluationOrder) -> Sequence[Evaluation]:
    """Write the page of all evaluations that have ended, if any, and return them."""
    folders = [checkpoints.evaluation(step) for step in checkpoints.evaluated()]
    if not folders:
        return []
    evaluations = read_evaluations(folders)
    write_page(evaluations, order.output / PAGE_NAME)
    return evaluations


def _print_progress(
    step: int, output: Path, evaluations: Sequence[Evaluation], display: Display
) -> None:
    """Print the means of the newest evaluation, and what has changed since the first one."""
    number = [one.folder for one in evaluations].index(output)
    for benchmark in compared_benchmarks(evaluations):
        if (found := benchmark.results[number]) is None:
            continue
        text = f"step {step}, {benchmark.name}: mean {benchmark.variable} "
        text += estimate_text(found.mean)
        if (change := benchmark.differences[number]) is not None:
            text += f", {estimate_text(change, signed=True)} since {evaluations[0].label}"
        print_line(display.console, text)


def _validation_files(config: RunConfig) -> Mapping[str, Path]:
    files = [Path(file) for file in file_list(config.data.val_files or [])]
    if not files:
        raise DataError("data.val_files: the run has none; give --benchmark")
    return files_by_name([(file.stem, file) for file in files])
