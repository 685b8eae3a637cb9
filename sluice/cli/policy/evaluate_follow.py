"""`sluice eval --follow`: each checkpoint of a run, as it appears, also one that it deletes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import typer

from sluice.cli.run.evaluation import EvaluationOrder, evaluate_model, evaluation_config
from sluice.cli.run.evaluation_origin import refuse_other_origin
from sluice.cli.run.up import Display
from sluice.cli.running_run import is_active
from sluice.cli.terminal import print_json, print_line
from sluice.client.run_address import locate_run
from sluice.config.derived import checkpoint_folder, uses_adapters
from sluice.config.run import RunConfig
from sluice.config.schema.data import file_list
from sluice.data.benchmarks import files_by_name
from sluice.errors import ConfigError, DataError, SluiceError
from sluice.evaluation.comparison import Evaluation, compare_benchmarks, read_evaluations
from sluice.evaluation.page import PAGE_NAME, write_page, write_report
from sluice.evaluation.results import RESULTS_NAME, Results, read_results, write_results
from sluice.evaluation.statistics import estimate_text
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED
from sluice.service_contract import CONFIG_NAME

EVALUATIONS_NAME = "evaluations"
"""In a run's folder: a folder for each evaluated checkpoint."""
_LOOK_EVERY_S = 2.0
_NO_MODEL = Path(os.devnull)  # checkpoints differ; all else is compared
EvaluateModel = Callable[[EvaluationOrder, Display], Results]
_CHECKPOINT = re.compile(r"global_step_(\d+)")
_MODEL = Path("actor") / "huggingface"
_WEIGHTS = "*.safetensors"
_KEPT = "model"
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}


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
    checkpoints = RetainedCheckpoints(folder, order.output)
    for step in checkpoints.evaluated_steps():
        any_model = replace(order, model=_NO_MODEL)
        refuse_other_origin(checkpoints.evaluation(step), evaluation_config(any_model))
        if checkpoints.is_kept(step):
            _finish(checkpoints, step)
    print_line(display.console, f"following {folder}; evaluations: {order.output}")
    try:
        with checkpoints.retaining(look_every_s):
            while True:
                is_running = asyncio.run(is_active(location.run_dir))
                checkpoints.retain_new()  # after that: the run's last save comes before its end
                if waiting := checkpoints.waiting_steps():
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
    if uses_adapters(config.actor_rollout_ref.model):
        raise ConfigError(
            f"--follow {run}: the run trains adapters (actor_rollout_ref.model.lora_rank), and its "
            "checkpoints have no whole weights; for each, sluice merge global_step_N OUTPUT, then "
            "sluice eval --model OUTPUT"
        )


def _evaluate_checkpoint(
    checkpoints: RetainedCheckpoints,
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
        if checkpoints.is_readable(step):
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


def _finish(checkpoints: RetainedCheckpoints, step: int) -> Results:
    """Name the run's checkpoint in the results of an evaluation, and delete the kept one."""
    output = checkpoints.evaluation(step)
    with_checkpoint = msgspec.structs.replace(
        read_results(output), model=str(checkpoints.checkpoint(step))
    )
    results = write_results(output, with_checkpoint)
    write_report(output)
    checkpoints.release(step)
    return results


def _compare(checkpoints: RetainedCheckpoints, order: EvaluationOrder) -> Sequence[Evaluation]:
    """Write the page of all evaluations that have ended, if any, and return them."""
    folders = [checkpoints.evaluation(step) for step in checkpoints.evaluated_steps()]
    if not folders:
        return []
    evaluations = read_evaluations(folders)
    write_page(evaluations, order.output / PAGE_NAME)
    return evaluations


def _print_progress(
    step: int, output: Path, evaluations: Sequence[Evaluation], display: Display
) -> None:
    """Print the means of the newest evaluation, and what has changed since the first one."""
    number = [evaluation.folder for evaluation in evaluations].index(output)
    for benchmark in compare_benchmarks(evaluations):
        if (results := benchmark.results[number]) is None:
            continue
        text = f"step {step}, {benchmark.name}: mean {benchmark.variable} "
        text += estimate_text(results.mean)
        if (change := benchmark.differences[number]) is not None:
            text += f", {estimate_text(change, signed=True)} since {evaluations[0].label}"
        print_line(display.console, text)


def _validation_files(config: RunConfig) -> Mapping[str, Path]:
    files = [Path(file) for file in file_list(config.data.val_files or [])]
    if not files:
        raise DataError("data.val_files: the run has none; give --benchmark")
    return files_by_name([(file.stem, file) for file in files])


class RetainedCheckpoints:
    """The models of a run's checkpoints, kept in the folders of their evaluations.

    A model is kept by hard links, which take no space while the run has it too, and by copies
    where the file system has no links. Checkpoints without whole weights are not kept.

    Args:
        checkpoints: the run's folder of ``global_step_N``.
        evaluations: gets ``global_step_N/model``.
    """

    def __init__(self, checkpoints: Path, evaluations: Path) -> None:
        self._checkpoints, self._evaluations = checkpoints, evaluations
        self._lock = threading.Lock()

    @contextmanager
    def retaining(self, look_every_s: float) -> Iterator[None]:
        """Keep each checkpoint that appears while the block runs."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(look_every_s):
                self.retain_new()

        thread = threading.Thread(target=watch, name="checkpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def retain_new(self) -> None:
        """Keep what is there and was not evaluated. What vanishes meanwhile is left out."""
        with self._lock:
            for step in steps_with(self._checkpoints, str(_MODEL)):
                target = self._kept_model(step)
                if not target.exists() and not (target.parent / RESULTS_NAME).exists():
                    self._keep_model(self.checkpoint(step) / _MODEL, target)

    def waiting_steps(self) -> list[int]:
        """Return the steps without an evaluation that has ended, in order."""
        readable_steps = {
            *steps_with(self._checkpoints, "actor"),
            *steps_with(self._evaluations, _KEPT),
        }
        return sorted(readable_steps - set(self.evaluated_steps()))

    def evaluated_steps(self) -> list[int]:
        """Return the steps whose evaluations have ended, in order."""
        return steps_with(self._evaluations, RESULTS_NAME)

    def checkpoint(self, step: int) -> Path:
        """Return the run's own folder of a checkpoint; the run may have deleted it."""
        return self._checkpoints / f"global_step_{step}"

    def evaluation(self, step: int) -> Path:
        """Return the folder of a checkpoint's evaluation."""
        return self._evaluations / f"global_step_{step}"

    def is_kept(self, step: int) -> bool:
        """Return whether the model is in the folder of its evaluation."""
        return self._kept_model(step).exists()

    def model(self, step: int) -> Path:
        """Return the folder to evaluate: the kept model, or the run's where none is kept."""
        return self._kept_model(step) if self.is_kept(step) else self.checkpoint(step)

    def is_readable(self, step: int) -> bool:
        """Return whether the model can still be read."""
        return self.is_kept(step) or (self.checkpoint(step) / "actor").is_dir()

    def release(self, step: int) -> None:
        """Delete the kept model: its evaluation has ended."""
        with self._lock:
            shutil.rmtree(self._kept_model(step), ignore_errors=True)

    def _kept_model(self, step: int) -> Path:
        return self.evaluation(step) / _KEPT

    def _keep_model(self, model: Path, target: Path) -> None:
        if not any(model.glob(_WEIGHTS)):
            return
        draft = target.with_name(f".{_KEPT}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            shutil.copytree(model, draft, copy_function=_link)
            draft.rename(target)
        except OSError:  # deleted meanwhile, or no space: then it is evaluated where it is
            shutil.rmtree(draft, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)


def steps_with(folder: Path, content: str) -> list[int]:
    """Return N of each folder ``global_step_N`` with this content, in order."""
    matches = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("global_step_*"))
    steps = (int(match[1]) for match in matches if match)
    return sorted(step for step in steps if (folder / f"global_step_{step}" / content).exists())
