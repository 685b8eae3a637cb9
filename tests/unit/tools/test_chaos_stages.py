"""What the seconds after a fault are, from what an observer saw."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import cast

import pytest

from tools.chaos.__main__ import _recovered_s, _recoveries
from tools.chaos.faults import FAR, PLAYED_BY, SINGLE, Fault, Injected
from tools.chaos.observation import Observer, SeenLine
from tools.chaos.stages import STAGES, back_s, stage_seconds, stage_table
from tools.chaos.verdict import Yield

KILLED_S = 100.0
REPLICA = {
    "up": [(100.1, "warning: rollout-1 ended with SIGKILL; starting again at once")],
    "rollout-1": [
        (90.0, "01:00:00 INFO rollout-1 __main__: loading the model from m into torch"),
        (103.2, "01:00:13 INFO rollout-1 __main__: loading the model from m into torch"),
        (104.0, "01:00:14 INFO rollout-1 sluice.rpc.server: listening on 127.0.0.1:1"),
    ],
    "trainer": [
        (95.0, "replica rollout-1 registered at 127.0.0.1:1"),
        (103.9, "replica rollout-1 registered at 127.0.0.1:2"),
        (104.5, "replica rollout-1 serves version 7"),
    ],
}
EXPECTED = {
    "noticing": 0.1,
    "starting": 0.1,
    "imports": 3.0,
    "loading": 0.8,
    "registering": 0.0,  # its line was read before the one of its cause
    "weights": 0.5,
    "first group": 1.5,
}


def observed(
    lines: dict[str, list[tuple[float, str]]],
    groups: list[Yield],
    starts: tuple[float, ...] = (),
    steps: tuple[float, ...] = (),
) -> Observer:
    seen: dict[str, list[SeenLine]] = defaultdict(list)
    for name, each in lines.items():
        seen[name] = [SeenLine(at_s, text) for at_s, text in each]
    found = SimpleNamespace(
        lines=seen, groups=groups, steps_s=list(steps), started_s=lambda _: list(starts)
    )
    return cast("Observer", found)


def injected(kind: str, target: str, at_s: float = KILLED_S, seconds: float = 0.0) -> Injected:
    return Injected(Fault(0.0, kind, 0.0, seconds), at_s, target)


def of(*at_s: float, on: str = "rollout-1") -> list[Yield]:
    return [Yield(each, 100.0, (on,)) for each in at_s]


KILL = injected("kill_replica", "rollout-1")


def test_every_kind_of_single_fault_has_stages() -> None:
    assert set(STAGES) == {*SINGLE, *PLAYED_BY.values()}


def test_the_seconds_of_a_replicas_death_are_those_of_its_stages() -> None:
    # A group of the dead process ends elsewhere: that is no sign of the new one.
    observer = observed(REPLICA, of(100.3, 106.0), starts=(50.0, 100.2))
    assert stage_seconds(observer, KILL) == pytest.approx(EXPECTED)
    assert back_s(observer, KILL) == 6.0
    table = stage_table(observer, [KILL])["kill_replica"]
    assert table["imports"] == [3.0, 3.0]
    assert list(table) == [*EXPECTED, "back"]


def test_a_process_that_started_before_the_kill_was_noted_is_the_next_one() -> None:
    observer = observed({**REPLICA, "up": [(99.95, REPLICA["up"][0][1])]}, of(106.0), (50.0, 99.9))
    assert back_s(observer, KILL) == 6.0


def test_a_killed_replica_without_all_of_its_stages_is_not_back() -> None:
    for name in ("rollout-1", "trainer"):
        observer = observed({**REPLICA, name: REPLICA[name][:1]}, of(106.0), starts=(100.2,))
        assert stage_seconds(observer, KILL) is None
    assert stage_seconds(observed(REPLICA, of(100.3), starts=(100.2,)), KILL) is None


def test_what_came_after_the_next_fault_belongs_to_that_one() -> None:
    observer = observed(REPLICA, of(106.0), starts=(100.2,))
    assert stage_seconds(observer, KILL, until_s=105.0) is None
    again = injected("kill_replica", "rollout-0", 105.0)
    assert stage_table(observer, [KILL, again]) == {}


def test_a_replica_that_was_never_dropped_is_back_with_its_next_group() -> None:
    stop = injected("stop_replica", "rollout-1", seconds=2.0)
    assert stage_seconds(observed({}, of(101.0, 103.0)), stop) == {"first group": 1.0}


def test_the_far_replica_has_no_line_of_the_launcher() -> None:
    lines = {**REPLICA, "up": [], FAR: REPLICA["rollout-1"]}
    lines["trainer"] = [(at_s, text.replace("rollout-1", FAR)) for at_s, text in lines["trainer"]]
    found = stage_seconds(
        observed(lines, of(106.0, on=FAR), starts=(100.2,)), injected("kill_replica", FAR)
    )
    assert found is not None
    assert "noticing" not in found
    assert sum(found.values()) == pytest.approx(6.0)


def test_recovery_is_the_rate_before_this_fault_and_not_before_what_was_killed_works() -> None:
    """The rate of the run's beginning says nothing about a policy that has learned since."""
    stop = injected("stop_reward", "reward", seconds=2.0)
    before = of(*(KILLED_S - n for n in range(8, 0, -1)))

    def found(*after: float) -> float | None:
        return _recovered_s(observed({}, before + of(*after)), stop, time.monotonic(), None, 4.0)

    assert found(103.0, 104.0, 105.0, 106.0, 106.5) == 1.0
    assert found(103.0, 109.0, 110.0, 111.0, 112.0) == 7.0
    assert found() is None


def test_what_works_again_only_after_the_next_fault_did_not_recover_from_this_one() -> None:
    groups = of(*range(92, 100), *range(106, 130))
    observer = observed(REPLICA, groups, starts=(100.2,))
    options = argparse.Namespace(single=True, size="tiny")

    def not_seen(*done: Injected) -> object:
        found = _recoveries(observer, done, options, 0.0, 200.0)["recovery_s"]
        return cast("dict[str, object]", found)["not_seen"]

    assert not_seen(KILL) == 0
    assert not_seen(KILL, injected("kill_replica", "rollout-0", 105.0)) == 2
