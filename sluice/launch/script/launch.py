"""Find the launch among the recorded calls of a script: its module and its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import ConfigError
from sluice.launch.script.recording import Recording, record

SUFFIXES = (".sh", ".bash")
_SETTING = re.compile(r"(?:\+{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)*=|~[A-Za-z_][\w.-]*)")
_DOTTED = re.compile(r"(?:\+{0,2}[A-Za-z_][\w-]*(?:\.[\w-]+)+=)")
_MOST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class ScriptLaunch:
    """The launch of a script.

    Attributes:
        module: the module or file that it starts.
        settings: its ``KEY=VALUE`` arguments, in order.
        left_out: its other arguments, such as Hydra's ``--config-name``.
        not_run: the other programs that the script would run, as lines.
        unset: variables without a value that the script used.
    """

    module: str
    settings: tuple[str, ...]
    left_out: tuple[str, ...]
    not_run: tuple[str, ...]
    unset: tuple[str, ...]


def is_script(file: Path) -> bool:
    """Return whether a file is a shell script, by its suffix or its first line."""
    if file.suffix in SUFFIXES:
        return True
    try:
        with file.open("rb") as opened:
            first = opened.readline(200)
    except OSError:
        return False
    return re.match(rb"#!.*\b(ba|da|k|z)?sh\b", first) is not None


def launch_of(script: Path, arguments: Sequence[str], *, isolated: bool = True) -> ScriptLaunch:
    """Return what a script would launch; nothing is launched.

    Args:
        script: a bash script that calls ``python3 -m verl.trainer.main_ppo key=value ...``, also
            below ``ray job submit --`` and the like.
        arguments: overrides: the script gets them as ``"$@"``; if it passes none on, they follow
            its own.
        isolated: as of `record`.

    Raises:
        ConfigError: it launches nothing, or several different things, or cannot be run.
        DeadlineError: it does not end.
    """
    recording = record(script, arguments, isolated=isolated)
    launches = [call for call in recording.calls if _start_of(call) is not None]
    if not launches:
        raise ConfigError(_no_launch(script, recording))
    if len(set(launches)) > 1:
        names = "; ".join(shown(call) for call in dict.fromkeys(launches))
        raise ConfigError(
            f"script {script}: starts {len(set(launches))} different trainings ({names}); give a "
            "script that starts one"
        )
    call = launches[0]
    start = _start_of(call)
    assert start is not None
    given = call[start + 1 :]
    settings = [word for word in given if _SETTING.match(word)]
    if not set(arguments) & set(settings):
        settings += arguments
    return ScriptLaunch(
        call[start],
        tuple(settings),
        tuple(word for word in given if not _SETTING.match(word)),
        tuple(dict.fromkeys(shown(one) for one in recording.calls if one not in launches)),
        recording.unset,
    )


def _start_of(call: Sequence[str]) -> int | None:
    """Return the position of the started module or file; None: the call is no launch.

    That is the module of the last ``-m``, or the last ``.py`` file, with a dotted setting after it;
    verl's own modules need none.
    """
    for place in range(len(call) - 1, 0, -1):
        is_module = call[place - 1] == "-m" and not _SETTING.match(call[place])
        if not is_module and not (call[place].endswith(".py") and "=" not in call[place]):
            continue
        is_verl = re.fullmatch(r"(verl|recipe)\.[\w.]*main\w*", call[place]) is not None
        if is_verl or any(_DOTTED.match(word) for word in call[place + 1 :]):
            return place
    return None


def _no_launch(script: Path, recording: Recording) -> str:
    calls = "; ".join(dict.fromkeys(shown(call) for call in recording.calls)) or "nothing"
    ended = f", exit code {recording.exit_code}" if recording.exit_code else ""
    unset = f"; without a value: {', '.join(recording.unset)}" if recording.unset else ""
    errors = f"; it printed: {recording.errors.strip()}" if recording.errors.strip() else ""
    return (
        f"script {script}: starts no training with key=value arguments, such as python3 -m "
        f"verl.trainer.main_ppo data.train_batch_size=64; it would run: {calls}{ended}{unset}"
        f"{errors}"
    )


def shown(call: Sequence[str]) -> str:
    """Return a call as a line for people, cut if it is long."""
    line = shlex.join(call).replace("\n", " ")
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} ..."
