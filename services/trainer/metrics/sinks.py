"""Metric sinks: where a run's numbers go. `trainer.logger` names them; each is opened on demand."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from services.trainer.metrics.background_sink import BackgroundSink
from services.trainer.metrics.guarded_sink import GuardedSink, MetricSink
from sluice.concurrency.deadline import deadline
from sluice.errors import ConfigError


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
    "console": _Kind("console_sink:ConsoleSink"),
    JSONL: _Kind("jsonl_sink:JsonlSink"),
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
