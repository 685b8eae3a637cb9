"""The reward service's side of a scorer process: start it, send requests, kill it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import TypeVar

import msgspec

import services
from services.reward.grading.containment import MARK_VARIABLE, end_marked, new_mark
from services.reward.grading.messages import (
    FRAME_HEADER,
    MAX_REPLY_BYTES,
    PROGRESS_BYTES,
    Progress,
    ScorerAnswer,
    ScoreReply,
    ScoreRequest,
    ScorerSetup,
    SetupReply,
    frame,
    note_idle,
    read_progress,
)
from sluice.concurrency.process import SHORTAGES, ending_text
from sluice.concurrency.waits import deadline, waiting_for
from sluice.data.scoring import ScorerInput
from sluice.errors import ConfigError
from sluice.json_objects import DECODE_ERRORS
from sluice.types import FailureKind

WorkerT = TypeVar("WorkerT")

logger = logging.getLogger(__name__)

PEER = "scorer process"
START_TIMEOUT_S = 60.0
LAST_READ_S = 0.5
"""Extra seconds for the answer to an item graded in time, since the scorer's output is written
before its answer."""
END_TIMEOUT_S = 10.0  # scanning /proc takes seconds on a busy machine
_MAX_KILLED_STARTS = 2
_SHORTAGES = SHORTAGES | {errno.ENOSPC, errno.EDQUOT}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
# The folder that holds the package `services`; the working directory may be another.
_PACKAGE_ROOT = Path(services.__file__ or "").resolve().parent.parent


class LoadingEndedError(ConfigError):
    """A process ended while it loaded the user's code; a negative code is a signal's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


async def start_with_retries(start: Callable[[], Awaitable[WorkerT]]) -> WorkerT:
    """Start a process that loads the user's code. Retry at most twice if a signal ends it, and
    until the system has memory, a process and a file for it.

    The system may kill it when memory is short. Neither a kill nor a shortage must end the run.
    Waits for a grade have separate deadlines.

    Raises:
        LoadingEndedError: a signal ended it each time, or it exited.
        OSError: an error other than a shortage; waiting does not help.
    """
    num_killed, pause_s = 0, _FIRST_PAUSE_S
    while True:
        try:
            return await start()
        except LoadingEndedError as error:
            num_killed += 1
            if error.code >= 0 or num_killed > _MAX_KILLED_STARTS:
                raise
            logger.warning("%s; starting another one", error)
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            logger.warning("a process for the user's code does not start: %s; will retry", error)
            with waiting_for("this machine", "starting a process for the user's code"):
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class ScorerFault(Exception):
    """The process hung, died or sent an invalid answer. The caller kills it.

    Args:
        kind: ``SCORER_TIMEOUT`` or ``SCORER_CRASH``.
        item: index of the item it worked on; ``None`` if it worked on none.
        detail: text for the log.
    """

    def __init__(self, kind: FailureKind, item: int | None, detail: str) -> None:
        self.kind, self.item, self.detail = kind, item, detail
        super().__init__(detail)


class ScorerNotStartedFault(ScorerFault):
    """No process could be started for the items; there is none to kill."""


class ScorerWorker:
    """A running scorer process. It takes one request at a time. Create it with `start_worker`.

    Attributes:
        mark: identifies the worker and all processes that it started.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, page: mmap, timeout_s: float, mark: str
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._page, self._timeout_s = process, page, timeout_s
        self.mark = mark
        self._stdin, self._stdout = process.stdin, process.stdout
        self._reply_decoder = msgspec.msgpack.Decoder(ScoreReply)
        self._header: bytes | None = None
        self._num_requests = self._num_items = 0
        self._sent_at = 0.0

    async def set_up(self, setup: ScorerSetup) -> None:
        """Load the scorer within `START_TIMEOUT_S`.

        Raises:
            ConfigError: the custom function cannot be loaded.
            DeadlineError: loading it takes too long.
        """
        self._stdin.write(frame(setup))
        loading = setup.custom_path or "the built-in scorers"
        try:
            async with deadline(START_TIMEOUT_S, peer=PEER, phase=f"loading {loading}"):
                reply = msgspec.msgpack.decode(await self._read_body(), type=SetupReply)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await self._process.wait()
            raise LoadingEndedError(
                f"reward.custom_reward_function.path: the process that loads {loading} ended with "
                f"{ending_text(code)}; see its output above",
                code,
            ) from error
        if reply.error is not None:
            raise ConfigError(reply.error)

    async def score(self, items: Sequence[ScorerInput]) -> tuple[ScorerAnswer, ...]:
        """Grade `items` in order.

        Raises:
            ScorerFault: an item exceeded its time, the process ended, or it sent an invalid answer.
        """
        note_idle(self._page)
        self._sent_at, self._num_items = time.monotonic(), len(items)
        self._num_requests += 1
        try:
            self._stdin.write(frame(ScoreRequest(self._num_requests, tuple(items))))
            reply = self._reply_decoder.decode(await self._reply_before_timeout())
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._crash() from error
        except DECODE_ERRORS as error:
            raise _garbled_fault(str(error)) from error
        if reply.number != self._num_requests or len(reply.answers) != len(items):
            raise _garbled_fault(
                f"{len(reply.answers)} answers to request {reply.number}; awaited are "
                f"{len(items)} to request {self._num_requests}"
            )
        return reply.answers

    def kill(self) -> None:
        """Kill the process and its session at once; `wait_ended` kills processes that left the
        session."""
        kill_session(self._process)

    async def wait_ended(self) -> None:
        """Kill all that a killed process started, and wait until everything is gone.

        Raises:
            DeadlineError: a process is left (it hangs in the kernel).
        """
        async with deadline(END_TIMEOUT_S, peer=PEER, phase="ending after SIGKILL"):
            await end_marked(self.mark)
            await self._process.wait()

    async def wait_reaped(self) -> None:
        """Wait until the killed process itself is gone; the caller sets the deadline."""
        await self._process.wait()

    async def _reply_before_timeout(self) -> bytes:
        """Wait for the reply as long as the current item has time left."""
        while True:
            left_s = self._time_left()
            try:
                async with asyncio.timeout(left_s if left_s > 0 else LAST_READ_S):
                    return await self._read_body()
            except TimeoutError:
                if left_s > 0 or self._time_left() > 0:
                    continue
                progress = self._progress()
                detail = f"no answer within reward.scorer_pool.timeout_s = {self._timeout_s:g} s"
                raise ScorerFault(
                    FailureKind.SCORER_TIMEOUT, progress.item if progress else None, detail
                ) from None

    def _time_left(self) -> float:
        """Return the seconds until the current item times out.

        The limit of the whole request, with one item more, is an upper bound.
        """
        progress = self._progress()
        started_at = progress.started_at if progress else self._sent_at
        ends_at = min(
            started_at + self._timeout_s, self._sent_at + (self._num_items + 1) * self._timeout_s
        )
        return ends_at - time.monotonic()

    def _progress(self) -> Progress | None:
        return read_progress(self._page, self._num_items, self._sent_at)

    async def _read_body(self) -> bytes:
        # Keep the header: a wait that is cut short must not lose it.
        if self._header is None:
            self._header = await self._stdout.readexactly(FRAME_HEADER.size)
        (size,) = FRAME_HEADER.unpack(self._header)
        if size > MAX_REPLY_BYTES:
            raise _garbled_fault(f"a frame of {size} bytes; at most {MAX_REPLY_BYTES} are read")
        body = await self._stdout.readexactly(size)
        self._header = None
        return body

    async def _crash(self) -> ScorerFault:
        self.kill()
        code = await self._process.wait()
        progress = self._progress()
        item = progress.item if progress else None
        return ScorerFault(
            FailureKind.SCORER_CRASH, item, f"the scorer ended with {ending_text(code)}"
        )


def _garbled_fault(detail: str) -> ScorerFault:
    return ScorerFault(FailureKind.SCORER_CRASH, None, f"the scorer's answer is garbled: {detail}")


async def start_worker(setup: ScorerSetup, family: str) -> ScorerWorker:
    """Start a process and load its scorer; errors as in `ScorerWorker.set_up`.

    Args:
        family: see `containment.family_of`.
    """
    mark = new_mark(family)
    with tempfile.TemporaryFile() as file:
        file.truncate(PROGRESS_BYTES)
        page = mmap(file.fileno(), PROGRESS_BYTES)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.reward.grading.scorer_main"),
            *(str(os.getpid()), str(file.fileno())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(file.fileno(),),
            start_new_session=True,
            env=clean_environment(mark),
            limit=2**20,
        )
    worker = ScorerWorker(process, page, setup.timeout_s, mark)
    try:
        await worker.set_up(setup)
    except BaseException:
        worker.kill()
        await worker.wait_ended()
        raise
    return worker


def kill_session(process: asyncio.subprocess.Process) -> None:
    """Kill the session that a process leads, at once."""
    with suppress(ProcessLookupError):
        # Reaches what it started in the session, even after it has ended; no fork can escape it.
        os.killpg(process.pid, signal.SIGKILL)


def clean_environment(mark: str) -> dict[str, str]:
    """Return the environment variables of a process that runs the user's code: with a mark, without
    secrets."""
    inherited = os.environ.get("PYTHONPATH")
    path = [str(_PACKAGE_ROOT), *([inherited] if inherited else [])]
    # One thread each: the configuration sets the number of processes.
    own_variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        MARK_VARIABLE: mark,
    }
    # A reward function must not get the keys of the run's services.
    return {
        name: value for name, value in os.environ.items() if not _is_secret(name)
    } | own_variables


def _is_secret(name: str) -> bool:
    return name.startswith("SLUICE_") and name.endswith(("TOKEN", "_FILE"))
