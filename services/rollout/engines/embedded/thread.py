"""The thread that owns the model and runs the step loop.

Consumes: commands from the event loop.
Produces: deliveries and command results, handed to the event loop at most once per step.
Waits for: a command, on a condition, whenever there is nothing to generate; then a moment for
    others to come with it.
Unblocked by: any command, and by the request to stop.
On failure: the first unexpected error ends the loop; every running generation, every pending
    command and every later call gets it.
On shutdown: what runs is aborted and delivered, then the thread ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from services.rollout.engines.embedded.loop import GenerationLoop, RequestOutput
from sluice.concurrency.waits import waiting_for
from sluice.errors import DeadlineError, EngineError, SluiceError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 30.0
# A sleep, not a wait on the condition: each request would wake this thread, and take the
# interpreter's turn from the event loop, which needs it to let the next request in.
_GATHER_S = 0.005
_GATHER_MOST_S = 0.1

Command = Callable[[GenerationLoop], Any]
_Pending = tuple[Command, "asyncio.Future[Any] | None"]
_Settled = tuple["asyncio.Future[Any]", Any, BaseException | None]


class EngineThread:
    """The thread of one `GenerationLoop`.

    Args:
        build: makes the loop; called in the thread.
        deliver: takes the output of a step; called in the event loop.
        fail: takes the error that ended the loop; called in the event loop.
    """

    def __init__(
        self,
        build: Callable[[], GenerationLoop],
        deliver: Callable[[list[RequestOutput]], None],
        fail: Callable[[EngineError], None],
    ) -> None:
        self._build = build
        self._deliver = deliver
        self._fail = fail
        self._event_loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._commands: list[_Pending] = []
        self._settled: list[_Settled] = []
        self._stopping = False
        self._failure: EngineError | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether commands are still accepted."""
        return self._failure is None

    async def start(self) -> GenerationLoop:
        """Start the thread; return the loop that it built, or raise what building it raised."""
        started: asyncio.Future[GenerationLoop] = self._event_loop.create_future()
        self._commands.append((lambda loop: loop, started))
        self._thread.start()
        return await started

    def post(self, command: Command) -> None:
        """Run `command` between two steps. Raises EngineError once the engine broke."""
        self._enqueue(command, None)

    async def call(self, command: Callable[[GenerationLoop], _T]) -> _T:
        """Run `command` between two steps; return its result."""
        future: asyncio.Future[_T] = self._event_loop.create_future()
        self._enqueue(command, future)
        with waiting_for("torch engine", "ending a step"):
            return await future

    def _enqueue(self, command: Command, future: asyncio.Future[Any] | None) -> None:
        with self._wake:  # a failure drains the commands under the same lock
            if self._failure is not None:
                raise self._failure
            self._commands.append((command, future))
            self._wake.notify()

    async def stop(self) -> None:
        """Abort what runs and end the thread.

        Raises:
            DeadlineError: a step did not end.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError as error:
            raise DeadlineError("torch engine", "ending a step", _STOP_TIMEOUT_S) from error

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - a thread's boundary: callers get the error
            self._give_up(error)
        finally:
            self._to_event_loop(self._ended.set)

    def _work(self) -> None:
        loop = self._build()
        while not self._stopping:
            # Only an idle thread waits for commands; a busy one takes those that are there.
            idle = not loop.has_work
            self._obey(loop, idle=idle)
            if idle and loop.has_work and not loop.slots_busy:
                self._gather(loop)
            if loop.has_work and not self._stopping:
                loop.step()
            self._hand_over(loop)
        loop.abort_all()
        self._hand_over(loop)
        self._give_up(EngineError("the torch engine was stopped"))

    def _obey(self, loop: GenerationLoop, *, idle: bool) -> None:
        for command, future in self._next_commands(loop.rest, idle=idle):
            self._execute(loop, command, future)

    def _gather(self, loop: GenerationLoop) -> None:
        """Let an idle engine wait for requests that come together, as those of a train batch do.

        Steps and prefills of a few rows take nearly as long as those of many, and would take the
        processor from the event loop that brings the other requests.
        """
        seen, until_s = 0, time.monotonic() + _GATHER_MOST_S
        while seen < loop.queued < loop.slots and time.monotonic() < until_s:
            seen = loop.queued
            time.sleep(_GATHER_S)
            self._obey(loop, idle=False)
            self._hand_over(loop)
            if self._stopping or not loop.has_work:
                return

    def _next_commands(self, rest: Callable[[], None], *, idle: bool) -> list[_Pending]:
        with self._wake:
            if idle and not self._commands:
                rest()
            while idle and not self._commands and not self._stopping:
                self._wake.wait()
            commands, self._commands = self._commands, []
        return commands

    def _execute(
        self, loop: GenerationLoop, command: Command, future: asyncio.Future[Any] | None
    ) -> None:
        result, error = None, None
        try:
            result = command(loop)
        except SluiceError as refused:
            error = refused
        except Exception as broken:  # the loop's state is unknown: it must not step again
            self._settle(future, None, EngineError(f"torch engine: {broken!r}"))
            raise
        self._settle(future, result, error)

    def _settle(
        self, future: asyncio.Future[Any] | None, result: object, error: BaseException | None
    ) -> None:
        if future is not None:
            self._settled.append((future, result, error))

    def _hand_over(self, loop: GenerationLoop) -> None:
        deliveries, settled = loop.take_deliveries(), self._settled
        if deliveries or settled:
            self._settled = []
            self._to_event_loop(lambda: self._receive(deliveries, settled))

    def _receive(self, deliveries: list[RequestOutput], settled: list[_Settled]) -> None:
        if deliveries:
            self._deliver(deliveries)
        for future, result, error in settled:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _give_up(self, cause: Exception) -> None:
        """Raise an error in every waiting call; runs at the end of the thread."""
        failure = cause if isinstance(cause, SluiceError) else None
        if failure is None:
            logger.error("the torch engine broke", exc_info=cause)
        broken = EngineError(f"the torch engine broke: {cause!r}")
        broken = cause if isinstance(cause, EngineError) else broken
        # Under the lock no command can slip in after the last look.
        with self._wake:
            self._failure = broken
            commands, self._commands = self._commands, []
        settled, self._settled = self._settled, []
        waiting = [
            (future, None, failure or broken) for _, future in commands if future is not None
        ]
        self._to_event_loop(lambda: self._receive([], [*settled, *waiting]))
        self._to_event_loop(lambda: self._fail(broken))

    def _to_event_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The event loop was closed under the engine: nobody waits for the callback.
            self._stopping = True
