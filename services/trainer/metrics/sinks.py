"""Metric sinks: open those that `trainer.logger` names, contain their failures, and send them
the run's numbers.

A vendor's sink may raise or hang; neither may stop the run. So each sink has a thread of its own
(`BackgroundSink`). Sinks without a vendor, for files and the log, are at the end.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np

from sluice.concurrency.threads import BoundedWriter
from sluice.concurrency.waits import deadline
from sluice.errors import ConfigError
from sluice.report.progress import TimeLeft, step_line
from sluice.report.run_record import accuracy_of
from sluice.safe_text import without_secrets
from sluice.telemetry import metric_names
from sluice.whole_file import append_lines, write_whole

logger = logging.getLogger(__name__)

CONSOLE, JSONL = "console", "jsonl"
METRICS_FILE = "metrics.jsonl"
VALIDATION_FAILED = "val/failed"
"""A row with this key is a validation's."""
TABLE_COLUMNS = ("step", "input", "output", "score")

_SEED = 42
_MAX_QUEUED_WRITES = 256
_IDLE_S = 60.0  # a write wakes the thread at once
_OPEN_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 60.0
_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. /]", re.ASCII)
_LONGEST_MLFLOW_NAME = 250


@dataclass(frozen=True, slots=True)
class Example:
    """One validation response for readers."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Validation numbers of one version, with standard errors of the metrics over prompts."""

    metrics: Mapping[str, float]
    examples: tuple[Example, ...]
    generated_tokens: int
    standard_errors: Mapping[str, float] = field(default_factory=dict)


class MetricSink(Protocol):
    """A place that keeps or shows metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's numbers by metric name."""
        ...

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Write validation responses of the version after `step`; by default none."""
        return

    def close(self) -> None:
        """Put everything on disk, or send it; by default nothing is open."""
        return


class BackgroundSink:
    """A sink that one thread opens, feeds and closes. Writes keep their order.

    Failures of writes are counted: the first one is a warning.

    Args:
        open_sink: called once, in the thread; may raise.

    Attributes:
        opening: done when the sink is open, or holds the error of `open_sink`. Writes are queued
            until then.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricSink],
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._close_timeout_s = close_timeout_s
        self._num_failed = 0
        self.opening: Future[MetricSink] = Future()
        self.opening.set_running_or_notify_cancel()  # an awaiter that gives up does not cancel it
        self._writer = BoundedWriter[Callable[[], None]](
            "writes",
            f"logger {name}",
            lambda works: works[0](),
            max_waiting=_MAX_QUEUED_WRITES,
            batch=1,
            interval_s=_IDLE_S,
        )
        self._writer.put(self._open)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = dict(metrics)
        self._writer.put(lambda: self._attempt(lambda sink: sink.write(step, numbers)))

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        copy = tuple(examples)
        self._writer.put(lambda: self._attempt(lambda sink: sink.write_generations(step, copy)))

    def close(self) -> None:
        """Wait for queued writes, then close the sink; give up after `close_timeout_s`."""
        self._writer.close(self._close_timeout_s, last_item=self._end)

    def _open(self) -> None:
        try:
            self.opening.set_result(self._open_sink())
        except Exception as error:  # noqa: BLE001 - `open_sinks` raises it from `opening`
            self.opening.set_exception(error)

    def _attempt(self, work: Callable[[MetricSink], None]) -> None:
        try:
            work(self.opening.result())
        except Exception as error:  # noqa: BLE001 - vendors raise anything; a lost curve ends no run
            self._num_failed += 1
            if self._num_failed == 1:
                logger.warning(
                    "logger %s failed; the run continues without what it drops: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )

    def _end(self) -> None:
        self._attempt(lambda sink: sink.close())
        if self._num_failed:
            logger.warning("logger %s: %d writes failed", self._name, self._num_failed)


@dataclass(frozen=True, slots=True)
class SinkTarget:
    """The run that a sink writes for.

    Args:
        run_dir: files go below it.
        project: ``trainer.project_name``, the vendor's project or experiment.
        experiment: ``trainer.experiment_name``, the vendor's run.
        settings: the run's configuration by dotted key, shown beside the curves without secrets.
        replaces_after: an earlier process may have recorded steps above this one, which are
            recorded again now; None: there was no earlier process.
    """

    run_dir: Path
    project: str = "sluice"
    experiment: str = "default"
    settings: Mapping[str, object] = field(default_factory=dict)
    replaces_after: int | None = None


_SINKS: Mapping[str, str] = {
    CONSOLE: "sinks:ConsoleSink",
    JSONL: "sinks:JsonlSink",
    "tensorboard": "tensorboard_sink:TensorBoardSink",
    "wandb": "wandb_sink:WandbSink",
    "mlflow": "mlflow_sink:MlflowSink",
    "swanlab": "swanlab_sink:SwanlabSink",
    "trackio": "trackio_sink:TrackioSink",
}
"""The ``module:class`` in this package of each sink. A vendor's is named after its package."""


def check_sinks(names: Sequence[str]) -> None:
    """Refuse sinks that are unknown or whose package is missing; import nothing.

    Raises:
        ConfigError: names all of them and what to install.
    """
    problems = []
    for name in dict.fromkeys(names):
        if name not in _SINKS:
            problems.append(f"trainer.logger: {name!r} is unknown; choose from {', '.join(_SINKS)}")
        elif name not in (CONSOLE, JSONL) and not _is_installed(name):
            problems.append(_remedy(name))
    if problems:
        raise ConfigError("; ".join(problems))


async def open_sinks(
    names: Sequence[str],
    target: SinkTarget,
    *,
    open_timeout_s: float = _OPEN_TIMEOUT_S,
    close_timeout_s: float = _CLOSE_TIMEOUT_S,
) -> tuple[MetricSink, ...]:
    """Open the sinks that `trainer.logger` names, once each. Later failures are only warnings.

    Args:
        open_timeout_s: seconds each server has to answer; all sinks are opened at once.
        close_timeout_s: seconds a closing sink has to send its queued writes.

    Raises:
        ConfigError: a name is unknown, or its package is not installed, cannot be imported or
            refuses to start.
        DeadlineError: a server does not answer.
    """
    check_sinks(names)
    target = replace(target, settings=without_secrets(target.settings))
    sinks = {
        name: BackgroundSink(name, partial(_open, name, target), close_timeout_s)
        for name in dict.fromkeys(names)
    }
    try:
        for name, sink in sinks.items():
            async with deadline(
                open_timeout_s,
                peer=f"logger {name}",
                phase="opening it",
                remedy=f"look after its server and its key, or remove {name} from trainer.logger",
            ):
                await asyncio.wrap_future(sink.opening)
    except BaseException:
        for sink in sinks.values():
            if sink.opening.done() and sink.opening.exception() is None:
                await asyncio.to_thread(sink.close)
        raise
    return tuple(sinks.values())


def _open(name: str, target: SinkTarget) -> MetricSink:
    module, _, attribute = _SINKS[name].partition(":")
    package = __name__.rpartition(".")[0]
    try:
        open_sink: Callable[[SinkTarget], MetricSink] = getattr(
            importlib.import_module(f"{package}.{module}"), attribute
        )
    except ImportError as error:
        raise ConfigError(f"{_remedy(name)} ({error})") from error
    try:
        return open_sink(target)
    except Exception as error:
        raise ConfigError(
            f"trainer.logger: {name} cannot be opened ({type(error).__name__}: {error}); mend it, "
            f"or remove {name} from trainer.logger"
        ) from error


def _is_installed(package: str) -> bool:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    # wandb leaves a folder of its name behind, which is found as a namespace without a file.
    return spec is not None and spec.origin is not None


def _remedy(name: str) -> str:
    extra = "train" if name == "tensorboard" else name
    return (
        f"trainer.logger: {name} needs the package {name}, which is not installed; "
        f"run pip install 'sluice[{extra}]', or remove {name} from trainer.logger"
    )


class Reporter:
    """The run's numbers, in all sinks and on disk. A file that cannot be written is a warning.

    Args:
        run_dir: gets `validation/<step>.jsonl` and `accounts.json`.
        shown_generations: validation responses that sinks show (``trainer.log_val_generations``).
    """

    def __init__(
        self, sinks: Sequence[MetricSink], run_dir: Path, shown_generations: int = 0
    ) -> None:
        self._sinks = tuple(sinks)
        self._run_dir = run_dir
        self._shown_generations = shown_generations
        self._has_warned = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a finished step."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def validation(self, step: int, report: ValidationReport, seconds: float) -> None:
        """Record validation numbers of the version after `step`, and its examples."""
        metrics = {**report.metrics, "timing_s/testing": seconds, VALIDATION_FAILED: 0.0}
        metrics["val/generated_tokens"] = float(report.generated_tokens)
        self.step(step, metrics)
        rows = [
            {"input": e.prompt, "output": e.response, "gts": e.ground_truth, "score": e.score}
            for e in report.examples
        ]
        lines = "".join(json.dumps({**row, "step": step}) + "\n" for row in rows)
        self._write_file(self._run_dir / "validation" / f"{step}.jsonl", lines)
        chosen = choose_examples(report.examples, self._shown_generations)
        for sink in self._sinks if chosen else ():
            sink.write_generations(step, chosen)

    def validation_failed(self, step: int, seconds: float) -> None:
        """Record that the version after `step` could not be validated."""
        self.step(step, {VALIDATION_FAILED: 1.0, "timing_s/testing": seconds})

    def accounts(self, accounts: Mapping[str, float]) -> None:
        """Record how the run's prompts and tokens ended."""
        text = json.dumps(dict(accounts), indent=2, sort_keys=True)
        self._write_file(self._run_dir / "accounts.json", text + "\n")

    async def close(self) -> None:
        """Close all sinks concurrently, outside the event loop; each has its own time limit."""
        async with asyncio.TaskGroup() as tasks:
            for sink in self._sinks:
                tasks.create_task(asyncio.to_thread(sink.close), name="closing a logger")

    def _write_file(self, file: Path, text: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text.encode())
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s is not written; the run continues: %s", file, error)
            self._has_warned = True


def choose_examples(examples: Iterable[Example], count: int) -> list[Example]:
    """Choose up to `count` examples, of the same prompts at every validation.

    verl's choice (`verl/trainer/ppo/ray_trainer.py`, `_maybe_log_val_generations`), but among one
    response of each of some prompts: sort by input, shuffle with a fixed seed, take the first.
    """
    ordered = sorted(examples, key=lambda example: example.prompt)
    order = np.arange(len(ordered))
    np.random.RandomState(_SEED).shuffle(order)
    return [ordered[index] for index in order[: max(count, 0)]]


def mlflow_name(name: str) -> str:
    """Map a metric's name to one that MLflow accepts: ``@`` to ``_at_``, the rest to ``_``.

    MLflow reads names as paths, so empty, ``.`` and ``..`` parts are dropped. At most 250
    characters are kept.
    """
    mapped = _REFUSED_BY_MLFLOW.sub("_", name.replace("@", "_at_"))
    parts = [part for part in mapped.split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:_LONGEST_MLFLOW_NAME].rstrip("/") or "_"


class JsonlSink(MetricSink):
    """The file ``metrics.jsonl``.

    NaN and infinity become null, so that every reader can parse the lines.
    """

    def __init__(self, target: SinkTarget) -> None:
        self._file = target.run_dir / METRICS_FILE
        target.run_dir.mkdir(parents=True, exist_ok=True)
        self._file.open("ab").close()  # what cannot be written is an error of the start

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())}
        append_lines(self._file, json.dumps({"step": step, **finite}).encode() + b"\n")


class ConsoleSink(MetricSink):
    """Log lines in verl's form: ``step:N - key:value - ...``."""

    def __init__(self, target: SinkTarget | None = None) -> None:
        del target  # only files and vendors need it

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{name}:{value:.6g}" for name, value in sorted(metrics.items())]
        logger.info("%s", " - ".join([f"step:{step}", *parts]))

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Log a line per response, with line ends written as ``\\n``."""
        for example in examples:
            logger.info(
                "step:%d - input:%r - output:%r - score:%g",
                step,
                example.prompt,
                example.response,
                example.score,
            )


class ProgressSink(MetricSink):
    """Log a short line for each step and each validation, for a reader of the trainer's log."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps, self._time_left = total_steps, TimeLeft()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if metric_names.STEP_S in metrics:
            time_left = self._time_left.update(step, self._total_steps, metrics)
            logger.info("%s", step_line(step, self._total_steps, metrics, time_left))
        elif (accuracy := accuracy_of(metrics)) is not None:
            logger.info("validation after step %d: accuracy %.3f", step, accuracy)
