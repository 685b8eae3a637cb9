"""Check a run before it starts, and print what a user has to know."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET
from rich.console import Console

from sluice.cli.running_run import folder_setting, is_copied, last_seen_notice, newest_step
from sluice.cli.terminal import print_line
from sluice.config.check import launch_notes
from sluice.config.loading.loader import ReadRun, read_run, read_settings
from sluice.config.problems import Problem, Severity, errors, raise_problems
from sluice.config.run import RunConfig, known_keys
from sluice.doctor.configuration import without_wrong_keys
from sluice.doctor.examination import preflight
from sluice.doctor.files import is_writable, nearest_folder
from sluice.doctor.finding import DoctorContext, doctor_context
from sluice.errors import ConfigError
from sluice.launch.servicer import launched_processes
from sluice.report.run_record import METRICS_NAME, read_progress
from sluice.service_contract import CONFIG_NAME, LEDGER_FORMAT, LEDGER_NAME

# What decides where a run begins, and the words that resume it from its newest checkpoint.
_START_KEYS = frozenset({"trainer.resume_mode", "trainer.resume_from_path"})
_RESUMES = ("trainer.resume_mode=auto", "trainer.resume_from_path=null")
_OF_REWARD_SERVICE = frozenset({"reward", "environment"})


def check_run(
    file: Path | None, overrides: list[str], console: Console, *, is_local: bool = True
) -> DoctorContext:
    """Return a run that nothing known now keeps from working; print notices.

    If the run's processes start on this host's devices, its configuration has their split, which
    is printed too.

    Args:
        file: YAML file, or a file of overrides; ``None``: the defaults.
        overrides: in verl's spelling.
        console: where to print.
        is_local: whether the run's processes start on this host.

    Raises:
        ConfigError: lists all problems of keys, values, rules, files, packages and devices; or
            another run is active in the folder.
    """
    run = read_to_start(file, overrides)
    run_dir = Path(run.config.sluice.run_dir).absolute()
    asyncio.run(refuse_beside_another(run_dir))
    if notice := last_seen_notice(run_dir):
        spoils = "if they still run there, end this start: two runs spoil one folder"
        print_line(console, f"notice: {notice}; {spoils}")
    notes = without_wrong_keys(launch_notes(run.config, run.settings), run.problems)
    names_every_key = all(run.settings.get(key) is not UNSET for key in known_keys())
    if file is not None and (names_every_key or file.absolute() == run_dir / CONFIG_NAME):
        # sluice wrote it for a run, whose first start showed the notes.
        set_keys = read_settings(None, overrides).by_key()
        notes = [note for note in notes if note.key in set_keys]
    return check_before_start(run, console, notes, is_local=is_local)


def read_to_start(file: Path | None, overrides: list[str]) -> ReadRun:
    """Return a run as read; its own file resumes from its newest checkpoint, however it began.

    Raises:
        ConfigError: of `read_run`; or the file was copied or moved with the folder of its run.
    """
    run = read_run(file, overrides)
    if file is None:
        return run
    set_keys = set(read_settings(None, overrides).by_key())
    run_dir, folder = Path(run.config.sluice.run_dir), file.absolute().parent
    is_of_a_run = file.name == CONFIG_NAME and (folder / METRICS_NAME).is_file()
    if not is_of_a_run or not run_dir.is_absolute():
        return run
    if not is_copied(folder, run.config):
        resumes = not set_keys & _START_KEYS and _has_saved(run.config)
        return read_run(file, [*overrides, *_RESUMES]) if resumes else run
    if "sluice.run_dir" not in set_keys:
        override = shlex.quote(folder_setting(folder))
        raise ConfigError(
            f"{file}: sluice.run_dir = {run_dir}: the run's folder was copied or moved; add "
            f"{override} to continue in this one, or start {run_dir / CONFIG_NAME}"
        )
    return run


def _has_saved(config: RunConfig) -> bool:
    """Return whether the newest checkpoint is this run's, not one that it has turned away from.

    A run that began before that step and has saved nothing since has trained fewer steps. The line
    of one step may be missing: a trainer writes it after the checkpoint.
    """
    newest, trained = newest_step(config), read_progress(Path(config.sluice.run_dir)).last_step
    return newest is not None and newest <= trained + 1


def check_before_start(
    run: ReadRun,
    console: Console,
    notes: Sequence[Problem] = (),
    *,
    is_local: bool = True,
    grades: bool = True,
) -> DoctorContext:
    """Return a run that was read, as `check_run`.

    Args:
        run: as read.
        console: where to print.
        notes: to print before those that are found.
        is_local: whether the run's processes start on this host.
        grades: whether this host can grade and play, such as reach a judge or load an environment.

    Raises:
        ConfigError: as `check_run`.
    """
    examined = doctor_context(run, is_local=is_local)
    problems = preflight(
        examined,
        lambda check: (
            (is_local or not check.of_host) and (grades or check.name not in _OF_REWARD_SERVICE)
        ),
    )
    for note in [*notes, *(entry for entry in problems if entry.severity is Severity.NOTE)]:
        print_line(console, f"notice: {note.text}")
    raise_problems(errors(problems), run.source)
    if examined.devices.line:
        print_line(console, examined.devices.line)
    return examined


async def refuse_beside_another(run_dir: Path) -> None:
    """Raise ConfigError if a launcher on this machine already runs in the folder."""
    if await launched_processes(run_dir) is not None:
        raise ConfigError(
            f"sluice.run_dir = {run_dir}: another run is active in this folder; end it first, or "
            "give another folder"
        )


def refuse_unwritable(config: RunConfig) -> None:
    """Raise ConfigError if this user cannot write the folders of a run, which need not exist."""
    require_writable(config.sluice.run_dir, "sluice.run_dir =")
    if config.trainer.save_freq > 0 and config.trainer.default_local_dir:
        require_writable(config.trainer.default_local_dir, "trainer.default_local_dir =")


def require_writable(folder: str | Path, name: str) -> None:
    """Raise ConfigError if this user cannot write a folder, which need not exist.

    Args:
        folder: to write.
        name: what the message calls it.
    """
    existing = nearest_folder(folder)
    if not is_writable(existing):
        raise ConfigError(
            f"{name} {folder}: cannot be written by this user; give the right to {existing}, or "
            "give another folder"
        )


def refuse_other_ledger(config: RunConfig) -> None:
    """Raise ConfigError if the reward service would refuse the format of the folder's ledger.

    The format is that of SQLite's header (`user_version`), or 0 as long as it stands in the file's
    write-ahead log.
    """
    file = Path(config.sluice.run_dir).absolute() / LEDGER_NAME
    if config.sluice.reward.ledger != "sqlite" or not file.is_file():
        return
    with file.open("rb") as opened:
        header = opened.read(64)
    ledger_format = int.from_bytes(header[60:], "big")
    if header.startswith(b"SQLite format 3\0") and ledger_format not in (0, LEDGER_FORMAT):
        raise ConfigError(
            f"{file}: format {ledger_format}, and this version of sluice reads {LEDGER_FORMAT}; "
            "use the version that wrote it, give another sluice.run_dir, or move the file away to "
            "start without the prompts that clients have submitted"
        )
