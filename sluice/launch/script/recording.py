"""Run a launch script under bash without its programs, and record their calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from sluice.errors import ConfigError, DeadlineError

# They read and print; nothing that a script's launch depends on needs more.
PRINTERS = (
    *("basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "id", "jq", "ls"),
    *("nproc", "printenv", "readlink", "realpath", "seq", "sort", "tail", "tr", "uname", "uniq"),
    *("wc", "whoami"),
)
# A script may look for them before it uses them.
_RECORDED = ("python", "python3", "ray", "torchrun", "pip", "conda", "accelerate", "nohup")
_STUBS = {
    "bash": 'while [ "$1" = -l ] || [ "$1" = --login ]; do shift; done\n'
    'case "$1" in -lc) shift; set -- -c "$@" ;; esac\nexec "$__SLUICE_BASH" "$@"',
    "sh": 'exec "${0%/*}/bash" "$@"',
    "record": 'printf \'%s\\0\' "$#" "$@" >>"$__SLUICE_RECORD"',
    "recorder": 'printf \'%s\\0\' "$(($# + 1))" "${0##*/}" "$@" >>"$__SLUICE_RECORD"',
    "tee": "exec {cat}",
    "hostname": "exec {uname} -n",
    # Neither edits a file in place, nor runs a program of its own.
    "sed": 'for word; do case "$word" in -*i* | --in-place*) exec "${0%/*}/record" sed "$@" ;; '
    'esac; done\nexec {sed} --sandbox "$@"',
    # Only what it lists: a reset of a device must not happen.
    "nvidia-smi": 'for word; do case "$word" in -L | --list-gpus | --query-* | --format* | -i* | '
    '[0-9]*) ;; *) exec "${0%/*}/record" nvidia-smi "$@" ;; esac; done\nexec {nvidia-smi} "$@"',
}
_NEEDED = ("cat", "uname", "sed", "nvidia-smi")
TIME_LIMIT_S = 20.0
_MOST_ERROR_CHARS = 600
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:\[[^\]]*\])?\}|([A-Za-z_]\w*))")
_UNBOUND = re.compile(r"([A-Za-z_]\w*): unbound variable")
_LOCAL = re.compile(r"\b(?:local|declare|read)\b([^\n;]*)")


@dataclass(frozen=True, slots=True)
class Recording:
    """What a script did.

    Attributes:
        calls: every program that it would have run, with its arguments.
        unset: variables without a value that it used up to its launch.
        errors: what it wrote to standard error, without the lines of ``set -x``.
        exit_code: its own.
    """

    calls: tuple[tuple[str, ...], ...]
    unset: tuple[str, ...]
    errors: str
    exit_code: int


def printers_in(script: str) -> list[str]:
    """Return the programs in a script's text that will really run: they only print."""
    words = set(re.findall(r"(?<![\w./=$-])[a-z]+(?:-[a-z]+)?(?![\w./=-])", _code(script)))
    return sorted(words & {*PRINTERS, "sed", "hostname", "nvidia-smi", "tee"})


def record(script: Path, arguments: Sequence[str], time_limit_s: float = TIME_LIMIT_S) -> Recording:
    """Run a script in the present folder; its programs are recorded in place of being run.

    Only programs that print (`PRINTERS` and a few more) run. Redirections write no file. The
    script and everything below it is killed at the end.

    Args:
        script: the file.
        arguments: what the script gets as ``"$@"``.
        time_limit_s: seconds after which it is killed.

    Raises:
        ConfigError: it cannot be read, or there is no bash.
        DeadlineError: it does not end.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(f"{script}: a launch script needs bash, which is not on the PATH")
    text = script_text(script)
    with (
        tempfile.TemporaryDirectory(prefix="sluice-script-") as scratch,
        as_file(files(__package__) / "recorder.sh") as recorder,
    ):
        folder = Path(scratch)
        environment = {
            **os.environ,
            "BASH_ENV": str(recorder),
            "__SLUICE_BASH": bash,
            "__SLUICE_BIN": str(_programs(folder / "bin")),
            "__SLUICE_NAMES": " ".join(referenced_names(text)),
            "__SLUICE_RECORD": str(folder / "calls"),
            "__SLUICE_UNSET": str(folder / "unset"),
            "TMPDIR": scratch,
        }
        exit_code = _run([bash, str(script), *arguments], environment, folder, time_limit_s)
        errors = _without_trace(_read(folder / "stderr"))
        unset = [*_read(folder / "unset").split(), *_UNBOUND.findall(errors)]
        return Recording(
            tuple(_calls(_read(folder / "calls"))),
            tuple(dict.fromkeys(unset)),
            errors[-_MOST_ERROR_CHARS:],
            exit_code,
        )


def script_text(script: Path) -> str:
    """Return the text of a script. Raise ConfigError if it cannot be read."""
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"script {script} cannot be read: {error}") from error


def referenced_names(script: str) -> list[str]:
    """Return the variables that a script uses without a default, without names local to it."""
    code = _code(script)
    local = {word.partition("=")[0] for found in _LOCAL.findall(code) for word in found.split()}
    found = (braced or plain for braced, plain in _REFERENCE.findall(code))
    return [name for name in dict.fromkeys(found) if name not in local]


def _code(script: str) -> str:
    """Return a script's text without comments and texts in single quotes."""
    kept, quote, before = [], "", "\n"
    characters = iter(script)
    for character in characters:
        if quote == "'":
            quote = "" if character == "'" else quote
        elif character == "\\":
            kept.append(" ")
            next(characters, "")
        elif character == "#" and not quote and before in " \t\n;":
            for following in characters:
                if following == "\n":
                    break
            kept.append("\n")
            character = "\n"
        elif character == "'" and not quote:
            quote = "'"
        else:
            if character == '"':
                quote = "" if quote else '"'
            kept.append(character)
        before = character
    return "".join(kept)


def _programs(folder: Path) -> Path:
    """Fill a folder with the programs that a script finds."""
    folder.mkdir()
    for name in PRINTERS:
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    real = {name: shutil.which(name) for name in _NEEDED}
    for name, body in _STUBS.items():
        missing = [one for one in _NEEDED if f"{{{one}}}" in body and real[one] is None]
        for one, found in real.items():
            body = body.replace(f"{{{one}}}", str(found))
        file = folder / name
        file.write_text(f"#!/bin/sh\n{_STUBS['recorder'] if missing else body}\n", encoding="utf-8")
        file.chmod(0o700)
    for name in _RECORDED:
        (folder / name).symlink_to("recorder")
    return folder


def _run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, time_limit_s: float
) -> int:
    with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return process.wait(time_limit_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"script {command[1]}",
                "running it without its programs",
                time_limit_s,
                remedy="it may wait for a program to answer; give its key=value lines in a file",
            ) from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _without_trace(errors: str) -> str:
    return "\n".join(line for line in errors.splitlines() if not line.startswith("+"))


def _calls(recorded: str) -> Iterator[tuple[str, ...]]:
    words = recorded.split("\0")[:-1]
    while words and words[0].isdigit():
        end = 1 + int(words[0])
        yield tuple(words[1:end])
        words = words[end:]
