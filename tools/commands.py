"""Programs that tools run and wait for; Debian's packages of them if the caller allows it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LAST_LINES = 20
_INSTALL_WITHIN_S = 900.0


class CommandError(Exception):
    """A program failed or took too long; the message ends with its last lines."""


class NoProgramError(Exception):
    """A program is not installed; the message names the remedy."""


def output_of(
    *command: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Return the standard output of a program.

    Raises:
        CommandError: it is missing, failed, or did not end in time.
    """
    text = " ".join(command)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{text}: no end within {timeout_s:g} s") from error
    if done.returncode != 0:
        lines = (done.stdout.splitlines() + done.stderr.splitlines())[-_LAST_LINES:]
        output = "".join(f"\n  {line}" for line in lines)
        raise CommandError(f"{text}: exit code {done.returncode}{output}")
    return done.stdout


def succeeds(*command: str, timeout_s: float) -> bool:
    """Return whether a program ends in time and with code 0."""
    try:
        output_of(*command, timeout_s=timeout_s)
    except CommandError:
        return False
    return True


def ensure_programs(programs: Sequence[str], packages: Sequence[str], variable: str) -> None:
    """Install Debian's packages if programs are missing and the variable is 1.

    Installing changes the machine, so the caller of the tool has to allow it.

    Raises:
        NoProgramError: programs are missing still.
    """
    missing = [name for name in programs if shutil.which(name) is None]
    if missing and os.environ.get(variable) == "1":
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            raise NoProgramError(f"{variable}=1 needs apt-get and root")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        install = ("install", "-y", "--no-install-recommends", *packages)
        try:
            for words in (("update",), install):
                command = ("apt-get", "-qq", *words)
                output_of(*command, timeout_s=_INSTALL_WITHIN_S, environment=quiet)
        except CommandError as error:
            raise NoProgramError(f"{', '.join(packages)}: not installed: {error}") from error
        missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        raise NoProgramError(
            f"{', '.join(missing)}: not found; install it, or on Debian set {variable}=1 to have "
            f"{', '.join(packages)} installed"
        )


@contextmanager
def started(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    ends_within_s: float = 60.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program within the block: its output goes to a file, its children end with it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process, ends_within_s)


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End a process of a session of its own; kill what is left of the session then."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
