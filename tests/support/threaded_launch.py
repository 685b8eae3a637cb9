"""`sluice up` without its process: its launcher in a thread, its services as forks with imports.

What it prints, writes, serves, starts and ends is the command's own; it checks nothing before. A
run of a process of its own takes 6 s of CPU time more, for imports.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import cast

import pytest

from sluice.cli.run import up
from sluice.cli.terminal import RunConsole
from sluice.config.run import RunConfig
from sluice.launch.plan import LaunchPlan, local_plan
from sluice.launch.processes import supervisor
from tests.support.preloaded import PreloadedHost
from tools.launched_run import LaunchedRun

_END_S = 400.0


class ThreadedUp:
    """A launcher in a thread.

    Args:
        config: of the run.
        output: gets what it prints.
    """

    def __init__(self, config: RunConfig, output: Path) -> None:
        self._config, self._output = config, output
        self._code = -1
        self._ends = False
        # Sets what a signal to stop sets; what Ctrl-C calls instead.
        self._stop: Callable[[], object] = lambda: None
        self._interrupt: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Starts the run."""
        self._output.touch()
        self._thread.start()

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return None if self._thread.is_alive() else self._code

    def wait(self) -> int:
        """The exit code, once it has ended; an error if it does not end."""
        self._thread.join(_END_S)
        assert not self._thread.is_alive()
        return self._code

    def interrupt(self) -> None:
        """Does what Ctrl-C does."""
        self._interrupt()

    def end(self) -> None:
        """Ends it at once, and waits for the end."""
        self._ends = True
        self._stop()
        self.wait()

    def printed(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(encoding="utf-8")

    @contextmanager
    def heeds_test(
        self, stop: asyncio.Event, *, interrupt: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Takes the place of `stop_on_signals`, which only the main thread can use."""
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        self._interrupt = lambda: loop.call_soon_threadsafe(interrupt or stop.set)
        if self._ends:
            stop.set()
        try:
            yield
        finally:
            self._stop = self._interrupt = lambda: None

    def _run(self) -> None:
        with self._output.open("w", encoding="utf-8") as file:
            console = RunConsole(file=file, width=400, highlight=False)
            self._code = up.start_run(self._config, up.Display(console)).exit_code


@contextmanager
def threaded_up(config: RunConfig, output: Path) -> Iterator[ThreadedUp]:
    """A run of a checked configuration; what is left of it ends with the block."""
    launcher = ThreadedUp(config, output)
    with preloaded_launches(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "stop_on_signals", launcher.heeds_test)
        launcher.start()
        try:
            yield launcher
        finally:
            launcher.end()


@contextmanager
def preloaded_launches() -> Iterator[None]:
    """Within the block, launchers of this process start services as forks of the preloaded one."""
    loggers = (logging.getLogger("sluice.launch"), up.logger)
    before = [(each, each.handlers[:], each.level) for each in loggers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(up, "local_plan", _preloaded_plan)
        try:
            yield
        finally:
            for logger, handlers, level in before:
                logger.handlers[:] = handlers
                logger.setLevel(level)


def _preloaded_plan(config: RunConfig, config_file: Path) -> LaunchPlan:
    return replace(local_plan(config, config_file), host=PreloadedHost())


@contextmanager
def threaded_launch(
    config: RunConfig,
    config_file: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[LaunchedRun]:
    """Takes the place of `tools.launched_run.launched_run`."""
    assert not options
    assert not environment
    with threaded_up(config, config_file.parent / "up.log") as launcher:
        yield LaunchedRun(Path(config.sluice.run_dir), cast("Popen[bytes]", launcher))
