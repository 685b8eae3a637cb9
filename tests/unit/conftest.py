"""What unit tests of several folders share."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from sluice.config.run import RunConfig
from sluice.rpc.policy import CALL_POLICIES


@pytest.fixture
def waits_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still while the event loop works, and is its next timer's when it idles.

    However slow the machine is, a timer then comes after all that could be done before it. For
    tests whose work is in the event loop: time would not wait for a thread or a process.
    """
    now_s, select = time.monotonic(), selectors.DefaultSelector.select

    def pass_by(selector: selectors.DefaultSelector, timeout: float | None = None) -> list[object]:
        nonlocal now_s
        found = select(selector, timeout if timeout is None else 0.0)
        if timeout and not found:
            now_s += timeout
        return found

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(selectors.DefaultSelector, "select", pass_by)


@pytest.fixture
def tries_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a peer that is out of reach is tried as often as ever, without a pause."""
    for name, policy in CALL_POLICIES.items():
        monkeypatch.setitem(CALL_POLICIES, name, replace(policy, backoff_s=0.0))


@pytest.fixture
def skip_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clocks of this process forward by so many seconds.

    With it a limit is long enough for whatever comes before it, and passes when the test says so.
    """
    skipped_s = 0.0

    def ahead(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + skipped_s

    def skip(seconds: float) -> None:
        nonlocal skipped_s
        skipped_s += seconds

    for name in ("monotonic", "time"):
        monkeypatch.setattr(time, name, ahead(getattr(time, name)))
    return skip


@pytest.fixture
def tried_scorers(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations whose scorer `sluice prepare` would try; it measures no prompts either."""
    tried: list[RunConfig] = []

    def note(config: RunConfig, *_: object) -> None:
        tried.append(config)

    def grade(*_: object) -> None:
        raise AssertionError("`sluice prepare` grades nothing: a judge may be out of its reach")

    monkeypatch.setattr("sluice.cli.run.prepare.try_responses", note)
    monkeypatch.setattr("sluice.doctor.reward.try_responses", grade)
    monkeypatch.setattr("sluice.doctor.prompts.measure_tokens", lambda _, rows: [1] * len(rows))
    return tried
