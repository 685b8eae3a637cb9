"""What a check examines (`DoctorContext`), and what it reports (`Finding`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import islice
from pathlib import Path
from threading import Lock

from sluice.config.derived import prompt_images
from sluice.config.loading.loader import KeySettings, ReadRun, read_run
from sluice.config.memory.shape import ModelShape, find_shape
from sluice.config.problems import Problem
from sluice.config.run import RunConfig
from sluice.config.sources import prompt_files
from sluice.data.prompt_files import ChunkReader, PromptFiles, open_prompt_files
from sluice.data.prompt_rows import PromptColumns, PromptRow
from sluice.launch.device_plan import DevicePlan, local_devices

MIB, GIB = 1 << 20, 1 << 30
ROWS_LOOKED_AT = 256


def gib(size: float) -> str:
    """Return ``1.5 GiB``, or MiB below one tenth of a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


class FindingSeverity(StrEnum):
    """How bad a finding is.

    OK: as it should be. WARNING: a run works, but slower or at a risk. PROBLEM: a run fails, or
    does something other than configured.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check looked at.

    Attributes:
        severity: how bad it is.
        what: the thing and its value.
        why: the consequence; empty if all is well, or if `what` includes it.
        remedy: what to do; empty if all is well.
    """

    severity: FindingSeverity
    what: str
    why: str = ""
    remedy: str = ""


def fine(statement: str) -> Finding:
    """Return a finding without consequence."""
    return Finding(FindingSeverity.OK, statement)


def warning(statement: str, why: str, remedy: str) -> Finding:
    """Return a finding that makes a run slower, or puts it at a risk."""
    return Finding(FindingSeverity.WARNING, statement, why, remedy)


def problem(statement: str, why: str, remedy: str) -> Finding:
    """Return a finding that makes a run fail, or do something other than configured."""
    return Finding(FindingSeverity.PROBLEM, statement, why, remedy)


def problem_of_text(sentence: str, why: str) -> Finding:
    """Return the problem of a sentence that ends with "; " and the remedy, as errors do."""
    statement, _, remedy = sentence.rpartition("; ")
    return problem(statement or remedy, why, remedy if statement else "correct it")


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """A machine and a run.

    Attributes:
        config: the configuration of the run; all defaults if the user named none.
        settings: the keys as the user set them.
        devices: which of this host's devices train and generate; `config` has their split.
        wrong: unknown keys and wrong values; `config` has the defaults in their place.
        has_run: whether the user named a run.
        environment: variables of the process that would start the run.
        read_shape: reads the files of the model, and waits as long as their file system does.
        first_rows: reads the files of a key once, for all checks.
    """

    config: RunConfig
    settings: KeySettings
    has_run: bool
    environment: Mapping[str, str]
    read_shape: Callable[[], ModelShape | None]
    first_rows: Callable[[str], tuple[PromptFiles, list[PromptRow]]]
    devices: DevicePlan
    wrong: Sequence[Problem] = ()

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape if it is known. Checks read it in threads that have deadlines."""
        return self.read_shape()


def read_doctor_context(
    file: Path | None, overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> DoctorContext:
    """Return this machine with the run of a file and overrides; without either, with no run.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    run = read_run(file, overrides)
    return doctor_context(run, environment, has_run=file is not None or bool(overrides))


def doctor_context(
    run: ReadRun,
    environment: Mapping[str, str] = os.environ,
    *,
    has_run: bool = True,
    is_local: bool = True,
) -> DoctorContext:
    """Return this machine with a run whose configuration was read.

    Args:
        is_local: whether the run's processes start on this host, on its devices.
    """
    opened, turn = cache(partial(open_first_rows, run.config)), Lock()

    def first_rows(key: str) -> tuple[PromptFiles, list[PromptRow]]:
        with turn:  # checks run in threads
            return opened(key)

    plan = DevicePlan(run.config)
    if is_local:
        plan = local_devices(run.config, run.keys, environment)
    return DoctorContext(
        plan.config,
        KeySettings(plan.config, run.settings.by_key()),
        has_run=has_run,
        environment=dict(environment),
        read_shape=cache(partial(find_shape, run.config.actor_rollout_ref.model.path)),
        first_rows=first_rows,
        devices=plan,
        wrong=run.problems,
    )


def open_first_rows(config: RunConfig, key: str) -> tuple[PromptFiles, list[PromptRow]]:
    """Return the files of a key, as the reward service opens them, and decoded rows: the first
    `ROWS_LOOKED_AT`, and one of each further file.

    Raises:
        DataError: a file or a row cannot be used.
    """
    data, with_images = config.data, prompt_images(config) is not None
    columns = PromptColumns.of(
        data.prompt_key, data.reward_fn_key, data.image_key, with_images=with_images
    )
    files = open_prompt_files(prompt_files(config)[key], columns, config_key=key)
    reader, rows, paths = ChunkReader(), list[PromptRow](), set[str]()
    for block in files.blocks:
        num_rows = max(ROWS_LOOKED_AT - len(rows), int(block.path not in paths))
        paths.add(block.path)
        decoded = (
            chunk.decode(n, columns) for chunk in reader.read(block) for n in range(len(chunk))
        )
        rows += islice(decoded, num_rows)
    return files, rows
