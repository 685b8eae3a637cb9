"""What every test runs under: no network, one thread, a time limit by tier, a mark if slow."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

# Before anything imports torch or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As sluice does: test modules import grpc first.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# A shell without job control has its background jobs ignore SIGINT, and so all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
# An example that a busy machine slows down is no failure.
settings.register_profile(
    "sluice", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sluice")
# Else each call of the command line in a test builds all commands from their signatures.
typer.testing._get_command = cache(typer.testing._get_command)
# Seconds; a mark on the test itself wins. They end what hangs and say nothing about speed.
TIME_LIMIT_S = {"multiprocess": 900, "architecture": 600}
DEFAULT_TIME_LIMIT_S = 300
_SLOW_LINES = [
    line.split()
    for line in (TESTS / "slow_modules.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
# Seconds by module.
SLOW_MODULES = {name: float(seconds[0]) if seconds else 5.0 for name, *seconds in _SLOW_LINES}
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # A copy: while a test runs, pytest captures what goes to the number 2.
    config.stash[_STDERR] = os.dup(2)


@pytest.fixture(autouse=True)
def _no_service_has_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service without TLS notes that for its process, which tests share."""
    monkeypatch.setattr("sluice.rpc.status._run_has_no_tls", False)


@pytest.fixture(autouse=True)
def _logs_go_where_they_went() -> Iterator[None]:
    """A service or launcher sends the log lines of its process, which tests share, to stderr."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest modules first, so that no worker starts one when the others are done.
    items.sort(key=lambda item: -SLOW_MODULES.get(_module(item.path), 0.0))
    for item in items:
        module = _module(item.path)
        if module in SLOW_MODULES:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timeout") is None:
            tier = module.partition("/")[0]
            item.add_marker(pytest.mark.timeout(TIME_LIMIT_S.get(tier, DEFAULT_TIME_LIMIT_S)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is imported and collected: it would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Else tests of models spend a twentieth of their time on the search.
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Bound the teardown of a test that failed: pytest has cancelled its limit by now."""
    limit_s = float(node.config.getini("faulthandler_timeout") or 0.0)
    if isinstance(node, pytest.Item) and limit_s > 0.0:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=node.config.stash[_STDERR])


@cache
def _module(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()
