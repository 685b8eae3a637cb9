"""A service's process: its command line, its age, its mark in the run's folder, stop signals, its
supervisor's death, its exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import gc
import json
import logging
import os
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from sluice.concurrency.waits import run_unless
from sluice.errors import MissingPackageError, SluiceError, leaves
from sluice.safe_text import printable
from sluice.whole_file import write_whole

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

EXIT_MISSING_PACKAGE = 78
"""The exit code where a package is not installed: no restart helps."""
SUPERVISOR_VARIABLE = "SLUICE_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1

MARKS_FOLDER = "processes"
ENDED = frozenset({"gone", "a zombie"})
"""States of a marked process that serves no more."""
SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors at a process's start that pass: the system had no memory, process or file for it."""
START_FIELD = 19
"""Ticks from the machine's start to the process's, in `stat_fields`."""
_STATE_FIELD = 0
_STOPPED, _ZOMBIE = frozenset("Tt"), frozenset("ZXx")
_IMPORTED_S = time.monotonic()
_held: list[BaseException] = []


def service_parser(service: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a service's command line, with `config` and `overrides`.

    Args:
        service: the module that is run, such as ``services.reward``.
        description, example: of its help.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {service}",
        description=description,
        epilog=f"example: python -m {service} {example}",
    )
    parser.add_argument("--config", type=Path, required=True, help="run configuration (YAML)")
    parser.add_argument("overrides", nargs="*", help="key=value, as in verl")
    return parser


def end_with_supervisor() -> None:
    """Ask the kernel for SIGKILL when the parent dies, if the parent supervises this process.

    Linux only; elsewhere, and without a supervisor, nothing happens.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):  # it died before the kernel knew
        sys.exit("the supervisor is gone")


def exempt_from_gc() -> None:
    """Exempt what this process holds by now from garbage collection; call it once it is up.

    An object that is dropped later is freed as usual, unless a cycle keeps it. It also logs what
    the start took.
    """
    # A full collection walks every container of the process. With torch and transformers loaded
    # these are 370,000, and it stops all threads for 0.2 to 0.3 s (measured 2026-11-23), a
    # replica's decode steps among them, although it frees next to nothing.
    gc.collect()
    gc.freeze()
    logger.info("up after %.1f s, %.1f s of CPU time", process_age_s(), time.process_time())


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A note in the run's folder: which process is which service.

    A service that does not answer cannot report why; the state of its process often shows it.

    Attributes:
        name: the service's.
        pid: its process id on `host`.
        host: the machine's name, and the namespace of its process ids: a container may have the
            name of its host, and has ids of its own.
        started: ticks from the machine's start to the process's; a later process with the same id
            has another. 0 where it is not known.
        address: where it serves, host:port; empty: not at all.
    """

    name: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
    host: str
    started: int
    address: str = ""

    def state(self) -> str:
        """Return alive, stopped by a signal, a zombie, gone, out of sight or unknown, in words."""
        if self.host != host_of_pids():
            return f"out of sight on {self.host.partition(' ')[0]}"
        fields = stat_fields(self.pid)
        if not fields:
            return "unknown" if _may_run(self.pid) else "gone"
        if self.started and int(fields[START_FIELD]) != self.started:
            return "gone"
        letter = fields[_STATE_FIELD]
        if letter in _STOPPED:
            return "stopped by a signal"
        return "a zombie" if letter in _ZOMBIE else "alive"


@contextmanager
def hold_file(file: Path, text: str, *, stays_after_error: bool = False) -> Iterator[None]:
    """Hold `text` in a file of a folder of the run while the block runs.

    Nothing happens where the run's folder does not exist: a replica may run on a machine without
    it. A file that another process has replaced meanwhile stays.

    Args:
        file: its folder is made, the run's folder above it is not.
        text: replaces the file's content at once.
        stays_after_error: an exception that ends the block leaves the file; a cancellation does
            not.
    """
    with suppress(OSError):  # services that need the disk report that it is full
        if file.parent.parent.is_dir():
            file.parent.mkdir(exist_ok=True)
            write_whole(file, text.encode())
    has_failed = False
    try:
        yield
    except Exception:
        has_failed = True
        raise
    finally:
        with suppress(OSError):
            is_ours = file.read_text(encoding="utf-8") == text
            if is_ours and not (has_failed and stays_after_error):
                file.unlink()


def mark_process(run_dir: Path, name: str, address: str = "") -> AbstractContextManager[None]:
    """Note this process in the run's folder while the block runs."""
    fields = stat_fields(os.getpid())
    started = int(fields[START_FIELD]) if fields else 0
    mark = ProcessMark(name, os.getpid(), host_of_pids(), started, address)
    return hold_file(mark_file(run_dir, name), json.dumps(asdict(mark)))


def mark_file(run_dir: Path, name: str) -> Path:
    """Return the file that holds the `ProcessMark` of a service."""
    return run_dir / MARKS_FOLDER / f"{name.replace('/', '_')}.json"


def process_marks(run_dir: Path, since_s: float = 0.0) -> tuple[ProcessMark, ...]:
    """Return the processes noted since `since_s` (seconds of the file system's clock), by name."""
    marks = []
    for file in sorted((run_dir / MARKS_FOLDER).glob("*.json")):
        with suppress(OSError, ValueError):  # such as half a file
            if file.stat().st_mtime >= since_s:
                marks.append(msgspec.json.decode(file.read_bytes(), type=ProcessMark))
    return tuple(marks)


def host_of_pids() -> str:
    """Return this machine's name and, where it has them, the namespace of our process ids."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _may_run(pid: int) -> bool:
    """Return whether a process has this id, although /proc may hide it, or be missing."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name; none where it has no such file.

    They count from 0 here, and from 3 in proc(5).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rsplit(")", 1)[1].split()


def process_age_s() -> float:
    """Return the seconds since the process started.

    Linux reports the start in ticks of a hundredth of a second; elsewhere, and where /proc cannot
    be read, time counts from the import of this module.
    """
    fields = stat_fields(os.getpid())
    if not fields:
        return time.monotonic() - _IMPORTED_S
    started_s = int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


@contextmanager
def stop_on_signals(
    stop: asyncio.Event, *, interrupt: Callable[[], None] | None = None, farewell: str = ""
) -> Iterator[None]:
    """Set `stop` on SIGTERM, SIGINT or SIGHUP while the block runs. Needs a running event loop.

    SIGHUP says that the terminal has closed: what is printed then is lost. After SIGINT, or a
    first SIGHUP, it is no second request; the kernel and the shell may both send it.

    Args:
        interrupt: called on SIGINT, and on a first SIGHUP, instead.
        farewell: logged on the signal.
    """

    def end() -> None:
        if farewell:
            logger.info("%s", farewell)
        stop.set()

    was_asked = False

    def ask() -> None:
        nonlocal was_asked
        was_asked = True
        (interrupt or end)()

    def hang_up() -> None:
        with suppress(OSError):
            _detach_output()
        if not was_asked:
            ask()

    loop = asyncio.get_running_loop()
    handlers = {signal.SIGTERM: end, signal.SIGINT: ask}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        handlers[signal.SIGHUP] = hang_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _detach_output() -> None:
    """Let the output go nowhere instead of to a terminal that has closed, which is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):
            os.dup2(nowhere, number)
    os.close(nowhere)


async def until_signal(work: Coroutine[Any, Any, ResultT], farewell: str = "") -> ResultT | None:
    """Return the result of `work`; None if a signal to stop, which logs `farewell`, ended it."""
    stop = asyncio.Event()
    with stop_on_signals(stop, farewell=farewell):
        return await run_unless(stop, work)


def end_by_sigterm() -> NoReturn:
    """End this process by SIGTERM, so that who supervises it sees no end of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    # The kernel ignores this signal for the first process of a container.
    sys.exit(128 + signal.SIGTERM)


def exit_status(name: str, run: Callable[[], object]) -> int:
    """Run a program's body; return 0 when it returns, 1 after errors of ours, which are printed
    after `name`; `EXIT_MISSING_PACKAGE` if they are missing packages.
    """
    try:
        run()
    except SluiceError as error:
        return _report(name, [error])
    except BaseExceptionGroup as group:
        if group.split(SluiceError)[1] is not None:
            raise
        return _report(name, leaves(group))
    return 0


def hold_errors(errors: Sequence[BaseException]) -> None:
    """Keep the last errors, and what their frames hold, until the process ends.

    To free a process group of torch can take until a peer answers, and one that is stopped never
    does.
    """
    _held[:] = errors


def _report(name: str, errors: list[BaseException] | list[SluiceError]) -> int:
    hold_errors(errors)
    for line in dict.fromkeys(str(error) for error in errors):
        sys.stderr.write(f"{name}: ERROR {printable(line)}\n")
    is_missing = all(isinstance(error, MissingPackageError) for error in errors)
    return EXIT_MISSING_PACKAGE if is_missing else 1


def ending_text(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a service, and end the process without the interpreter's own shutdown.

    That shutdown takes seconds with torch and transformers loaded, and frees nothing that the
    kernel would not free. The service has already ended everything that matters, in order; handlers
    of `atexit` do not run. After a defect too: peers would look for the ended process, and not find
    it in time. Output that nobody takes (a broken pipe, a full disk) changes nothing.

    Args:
        main: returns the exit code; 1 after a defect, whose traceback is printed.
    """
    try:
        code, defect = main(), ""
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - the process's boundary
        hold_errors([error])
        code, defect = 1, printable(traceback.format_exc())
    try:
        with suppress(OSError, ValueError):
            sys.stderr.write(defect)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)
