"""Metric sinks: open those that `trainer.logger` names, contain their failures, and send them
the run's numbers.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from services.trainer.metrics.step_metrics import ValidationReport
from sluice.concurrency.deadlines import deadline
from sluice.errors import ConfigError

TABLE_COLUMNS = ("step", "input", "output", "score")
_SEED = 42


@dataclass(frozen=True, slots=True)
class ValidationSample:
    """A validation prompt, the response to it and its score."""

    input: str
    output: str
    score: float


def choose_validation_samples(
    generations: Iterable[ValidationSample], count: int
) -> list[ValidationSample]:
    """`count` of them, or all if there are fewer; the same prompts at every validation.

    verl's choice: sorted by input, shuffled by a generator of a fixed seed, the first ones.
    """
    ordered = sorted(generations, key=lambda generation: generation.input)
    order = np.arange(len(ordered))
    np.random.RandomState(_SEED).shuffle(order)
    return [ordered[index] for index in order[: max(count, 0)]]


_REFUSED = re.compile(r"[^\w\-. /]", re.ASCII)
_LONGEST = 250


def mlflow_name(name: str) -> str:
    """`name` with ``@`` as ``_at_`` and every other refused character as ``_``.

    MLflow reads names as paths: empty, ``.`` and ``..`` parts go. At most 250 characters are kept.
    """
    mapped = _REFUSED.sub("_", name.replace("@", "_at_"))
    parts = [part for part in mapped.split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:_LONGEST].rstrip("/") or "_"


logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Takes metrics and keeps or shows them."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers by metric name."""
        ...

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Validation samples of the version after `step`, for reading along."""
        ...

    def close(self) -> None:
        """Everything written is on disk afterwards."""
        ...


class GuardedSink:
    """Passes on to `sink`; the first failure is a warning, later ones are counted.

    Args:
        name: the logger's, for the warning.
        sink: may raise anything.
    """

    def __init__(self, name: str, sink: MetricSink) -> None:
        self._name = name
        self._sink = sink
        self.num_dropped = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes a step on."""
        self._attempt(lambda: self._sink.write(step, metrics))

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Passes samples on."""
        self._attempt(lambda: self._sink.write_generations(step, generations))

    def close(self) -> None:
        """Closes, and says how much was lost."""
        self._attempt(self._sink.close)
        if self.num_dropped:
            logger.warning("logger %s: %d writes failed", self._name, self.num_dropped)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary to vendors: a curve is no run
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning(
                    "logger %s failed and the run goes on without what it drops: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )


_WAITING_WRITES = 256


class BackgroundSink:
    """Passes on in order; what finds the queue full is dropped and counted.

    Args:
        name: the logger's, for warnings.
        open_sink: called once, in the thread; may raise. The sink never raises.
        close_timeout_s: how long `close` waits for what is queued.

    Attributes:
        opening: done when the sink is open, with the error of `open_sink` if it failed. Until then
            writes are queued, after a failure they are dropped.
    """

    def __init__(
        self, name: str, open_sink: Callable[[], GuardedSink], close_timeout_s: float = 60.0
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._close_timeout_s = close_timeout_s
        self.opening: Future[None] = Future()
        self.opening.set_running_or_notify_cancel()
        self._queue: queue.Queue[Callable[[GuardedSink], None] | None] = queue.Queue(
            _WAITING_WRITES
        )
        self.num_dropped = 0
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues a step."""
        numbers = dict(metrics)
        self._put(lambda sink: sink.write(step, numbers))

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Queues samples."""
        samples = tuple(generations)
        self._put(lambda sink: sink.write_generations(step, samples))

    def close(self) -> None:
        """Waits for what is queued, then closes; gives up after `close_timeout_s`."""
        ends_s = time.monotonic() + self._close_timeout_s
        try:
            self._queue.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            self.num_dropped += self._queue.qsize()
        self._thread.join(max(0.0, ends_s - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "logger %s did not finish within %g s and is left behind",
                self._name,
                self._close_timeout_s,
            )
        if self.num_dropped:
            logger.warning(
                "logger %s: %d writes came faster than it took them", self._name, self.num_dropped
            )

    def _put(self, work: Callable[[GuardedSink], None]) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("logger %s is too slow: metrics are dropped", self._name)

    def _work(self) -> None:
        try:
            sink = self._open_sink()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for `opening`
            self.opening.set_exception(error)
            return
        self.opening.set_result(None)
        while (work := self._queue.get()) is not None:
            work(sink)
        sink.close()


@dataclass(frozen=True, slots=True)
class SinkTarget:
    """What a sink writes for.

    Args:
        run_dir: files go below it.
        project: ``trainer.project_name``, the vendor's project or experiment.
        experiment: ``trainer.experiment_name``, the vendor's run.
        settings: the run's configuration by dotted key, shown beside the curves.
        replaces_after: steps above this one may be on record already and are recorded anew; None:
            none are.
    """

    run_dir: Path
    project: str = "sluice"
    experiment: str = "default"
    settings: Mapping[str, object] = field(default_factory=dict)
    replaces_after: int | None = None


class _SinkType(Protocol):
    def __call__(self, target: SinkTarget) -> MetricSink: ...


@dataclass(frozen=True, slots=True)
class _Kind:
    """`sink` is ``module:class`` beside this file; `package` and `extra` are what it needs.

    `is_remote` sinks may talk to a server, so they live in a thread.
    """

    sink: str
    package: str | None = None
    extra: str = ""
    is_remote: bool = False


_OPEN_TIMEOUT_S = 60.0
JSONL = "jsonl"
_KINDS: Mapping[str, _Kind] = {
    "console": _Kind("local_sinks:ConsoleSink"),
    JSONL: _Kind("local_sinks:JsonlSink"),
    "tensorboard": _Kind("tensorboard_sink:TensorBoardSink", "tensorboard", "train"),
    "wandb": _Kind("wandb_sink:WandbSink", "wandb", "wandb", is_remote=True),
    "mlflow": _Kind("mlflow_sink:MlflowSink", "mlflow", "mlflow", is_remote=True),
    "swanlab": _Kind("swanlab_sink:SwanlabSink", "swanlab", "swanlab", is_remote=True),
    "trackio": _Kind("trackio_sink:TrackioSink", "trackio", "trackio", is_remote=True),
}


def check_sinks(names: Sequence[str]) -> None:
    """Refuse loggers that are unknown or whose package is missing; nothing is imported.

    Raises:
        ConfigError: naming all of them and what to install.
    """
    problems = sink_problems(names)
    if problems:
        raise ConfigError("; ".join(problems))


def sink_problems(names: Sequence[str]) -> list[str]:
    """A sentence for every logger that cannot be opened here."""
    problems = []
    for name in dict.fromkeys(names):
        kind = _KINDS.get(name)
        if kind is None:
            problems.append(f"trainer.logger: {name!r} is unknown; choose from {', '.join(_KINDS)}")
        elif kind.package is not None and not _is_installed(kind.package):
            problems.append(_remedy(name, kind))
    return problems


async def open_sinks(
    names: Sequence[str],
    target: SinkTarget | Path,
    *,
    open_timeout_s: float = _OPEN_TIMEOUT_S,
    close_timeout_s: float = 60.0,
) -> tuple[MetricSink, ...]:
    """The sinks that `trainer.logger` names, once each. A sink that fails later only warns.

    Args:
        names: by ``trainer.logger``.
        target: of the run; a path alone is its folder.
        open_timeout_s: seconds a server has to answer each of them; they are opened at once.
        close_timeout_s: seconds each of them has to send what is queued when it is closed.

    Raises:
        ConfigError: a name is unknown, the package is not installed or does not import, or it
            refuses to start.
        DeadlineError: a server does not answer.
    """
    check_sinks(names)
    place = SinkTarget(target) if isinstance(target, Path) else target
    sinks = {
        name: _start(name, _KINDS[name], place, close_timeout_s) for name in dict.fromkeys(names)
    }
    remote = {name: sink for name, sink in sinks.items() if isinstance(sink, BackgroundSink)}
    try:
        for name, sink in remote.items():
            await _opened(name, sink, open_timeout_s)
    except BaseException:
        for name in sinks.keys() - remote.keys():
            sinks[name].close()
        raise
    return tuple(sinks.values())


def _start(name: str, kind: _Kind, target: SinkTarget, close_timeout_s: float) -> MetricSink:
    if not kind.is_remote:
        return _open(name, kind, target)
    return BackgroundSink(name, lambda: _open(name, kind, target), close_timeout_s)


async def _opened(name: str, sink: BackgroundSink, seconds: float) -> None:
    async with deadline(
        seconds,
        peer=f"logger {name}",
        phase="opening it",
        remedy=f"look after its server and its key, or remove {name} from trainer.logger",
    ):
        await asyncio.wrap_future(sink.opening)


def _open(name: str, kind: _Kind, target: SinkTarget) -> GuardedSink:
    module, _, attribute = kind.sink.partition(":")
    package = __name__.rpartition(".")[0]
    try:
        sink_type = cast(
            "_SinkType", vars(importlib.import_module(f"{package}.{module}"))[attribute]
        )
    except ImportError as error:
        raise ConfigError(f"{_remedy(name, kind)} ({error})") from error
    try:
        opened = sink_type(target)
    except Exception as error:
        raise ConfigError(
            f"trainer.logger: {name} cannot be opened ({type(error).__name__}: {error}); mend it, "
            f"or remove {name} from trainer.logger"
        ) from error
    return GuardedSink(name, opened)


def _is_installed(package: str) -> bool:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder of that name (wandb leaves one behind) is found as a namespace without a file.
    return spec is not None and spec.origin is not None


def _remedy(name: str, kind: _Kind) -> str:
    return (
        f"trainer.logger: {name} needs the package {kind.package}, which is not installed; "
        f"run pip install 'sluice[{kind.extra}]', or remove {name} from trainer.logger"
    )


class Reporter:
    """The run's record on disk. A file that cannot be written is a warning, not the run's end.

    Args:
        sinks: take every metric.
        run_dir: gets `validation/<step>.jsonl` and `accounts.json`.
        shown_generations: validation samples that sinks show (``trainer.log_val_generations``).
    """

    def __init__(
        self, sinks: Sequence[MetricSink], run_dir: Path, shown_generations: int = 0
    ) -> None:
        self._sinks = tuple(sinks)
        self._run_dir = run_dir
        self._shown_generations = shown_generations
        self._has_warned = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a finished step."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def evaluation(self, step: int, evaluation: ValidationReport, seconds: float) -> None:
        """Records validation numbers of the version after `step`, and its examples."""
        metrics = {**evaluation.metrics, "timing_s/testing": seconds, "val/failed": 0.0}
        metrics["val/generated_tokens"] = float(evaluation.generated_tokens)
        self.step(step, metrics)
        rows = [
            {"input": e.prompt, "output": e.response, "gts": e.ground_truth, "score": e.score}
            for e in evaluation.examples
        ]
        lines = "".join(json.dumps({**row, "step": step}) + "\n" for row in rows)
        self._keep(self._run_dir / "validation" / f"{step}.jsonl", lines)
        self._show(step, evaluation)

    def _show(self, step: int, evaluation: ValidationReport) -> None:
        samples = [ValidationSample(e.prompt, e.response, e.score) for e in evaluation.examples]
        shown = choose_validation_samples(samples, self._shown_generations)
        for sink in self._sinks if shown else ():
            sink.write_generations(step, shown)

    def evaluation_failed(self, step: int, seconds: float) -> None:
        """Records that the version after `step` could not be validated."""
        self.step(step, {"val/failed": 1.0, "timing_s/testing": seconds})

    def accounts(self, accounts: Mapping[str, float]) -> None:
        """Records how the run's prompts and tokens ended."""
        text = json.dumps(dict(accounts), indent=2, sort_keys=True)
        self._keep(self._run_dir / "accounts.json", text + "\n")

    async def close(self) -> None:
        """Closes all sinks at once and beside the event loop; each gives up by its own limit."""
        async with asyncio.TaskGroup() as tasks:
            for sink in self._sinks:
                tasks.create_task(asyncio.to_thread(sink.close), name="closing a logger")

    def _keep(self, file: Path, text: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s is not written and the run goes on: %s", file, error)
            self._has_warned = True
