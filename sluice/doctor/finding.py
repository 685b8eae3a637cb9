"""What a check examines, and what it reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path

from sluice.config.loading.loader import KeySettings, keys_as_set, load_config
from sluice.config.memory.shape import ModelShape, find_shape
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30


def gib(size: float) -> str:
    """``1.5 GiB``, or MiB below one tenth."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


class Severity(StrEnum):
    """How bad a finding is.

    OK: as it should be. WARNING: a run works, slower or at a risk. PROBLEM: a run fails, or does
    something else than it was told.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: how bad it is.
        what: the thing and its value.
        why: what it would lead to; empty if all is well, or if `what` says it.
        remedy: what to do; empty if all is well.
    """

    severity: Severity
    what: str
    why: str = ""
    remedy: str = ""


def fine(what: str) -> Finding:
    """As it should be."""
    return Finding(Severity.OK, what)


def warning(what: str, why: str, remedy: str) -> Finding:
    """A run works, slower or at a risk."""
    return Finding(Severity.WARNING, what, why, remedy)


def problem(what: str, why: str, remedy: str) -> Finding:
    """A run fails, or does something else than it was told."""
    return Finding(Severity.PROBLEM, what, why, remedy)


def problem_of_sentence(sentence: str, why: str) -> Finding:
    """The problem that a message tells: the thing, and behind its last semicolon the remedy."""
    what, semicolon, remedy = sentence.rpartition("; ")
    return problem(what, why, remedy) if semicolon else problem(sentence, why, "correct it")


@dataclass(frozen=True, slots=True)
class Examined:
    """A machine and a run.

    Attributes:
        config: the run's; all defaults if none was named.
        settings: its keys as the user set them.
        has_run: whether one was named.
        environment: variables of the process that would start it.
        read_shape: reads the model's files, and waits as long as their file system does.
    """

    config: RunConfig
    settings: KeySettings
    has_run: bool
    environment: Mapping[str, str]
    read_shape: Callable[[], ModelShape | None]

    @property
    def shape(self) -> ModelShape | None:
        """The model's, where it is known. Checks ask in their own threads, which have deadlines."""
        return self.read_shape()


def examined_run(
    file: Path | None, overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Examined:
    """This machine, for the run of a file and overrides; without either for no run in particular.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    config = load_config(file, overrides)
    return Examined(
        config,
        KeySettings(config, keys_as_set(file, overrides)),
        has_run=file is not None or bool(overrides),
        environment=dict(environment),
        read_shape=cache(partial(_shape, config.actor_rollout_ref.model.path)),
    )


def _shape(model_path: str) -> ModelShape | None:
    try:
        return find_shape(model_path, None)
    except ConfigError:
        return None  # the check of the model's folder says what is wrong with it
