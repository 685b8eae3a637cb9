"""What the seconds after a fault are: the stages until what was hit works again.

A stage ends with a line of a log, the start of a process, a group that ended or a step that ended,
as the observer saw them (five times a second; a process's start is exact).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.chaos.faults import FAR, Injected
from tools.chaos.observation import Observer
from tools.chaos.verdict import percentile

START, GROUP, STEP = "process", "group", "step"
SUPERVISOR = "up"
# Files are read one after the other, so that a line may be seen before its cause. And on a busy
# machine the next process may have started before the tool notes the time of its kill.
_DISORDER_S = 0.3
_ITS_LOG = "{target}"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage.

    Attributes:
        name: what its seconds are.
        source: what ends it: START, GROUP, STEP, or the log of a service or of the supervisor.
        pattern: of the log's line, or of the names of a group's replicas; ``{target}`` is what was
            hit.
    """

    name: str
    source: str
    pattern: str = ""


_DEATH = (Stage("noticing", SUPERVISOR, "{target} ended with"), Stage("starting", START))
_WEIGHTS = (
    Stage("registering", "trainer", "replica {target} registered"),
    Stage("weights", "trainer", "replica {target} serves version"),
)
_ITS_GROUP = Stage("first group", GROUP, "{target}")
_ANY_GROUP = Stage("first group", GROUP)
STAGES: Mapping[str, tuple[Stage, ...]] = {
    "kill_replica": (
        *_DEATH,
        Stage("imports", _ITS_LOG, "loading the model from"),
        Stage("loading", _ITS_LOG, "listening on"),
        *_WEIGHTS,
        _ITS_GROUP,
    ),
    "stop_replica": (*_WEIGHTS, _ITS_GROUP),
    "partition": (*_WEIGHTS, _ITS_GROUP),
    "kill_reward": (
        *_DEATH,
        Stage("imports", "reward", "opening the data set"),
        Stage("loading", "reward", "listening on"),
        Stage("announcing", "reward", r"version \d+ on \d+ replicas"),
        _ANY_GROUP,
    ),
    "stop_reward": (_ANY_GROUP,),
    "kill_scorer": (Stage("replacing", "reward", "scorer replaced"), _ANY_GROUP),
    "kill_environment": (
        Stage("replacing", "reward", "environment worker .* replaced"),
        _ANY_GROUP,
    ),
    "kill_front": (Stage("starting", _ITS_LOG, "agents of .* call http"), _ANY_GROUP),
    "kill_trainer": (
        *_DEATH,
        Stage("imports", "trainer", "waiting for the reward service"),
        Stage("loading", "trainer", "listening on"),
        Stage("registering", "trainer", "registered at"),
        Stage("weights", "trainer", "serves version"),
        Stage("first step", STEP),
    ),
    "stop_trainer": (Stage("first step", STEP),),
}
"""By kind of fault, in order; the last one's end is recovery. ``imports`` includes the reading of
the configuration. What was stopped or cut off may not have been dropped: then it has only the last
stage."""


def stage_seconds(
    observer: Observer, injected: Injected, until_s: float = math.inf
) -> dict[str, float] | None:
    """Return seconds by stage, from the fault's end; None if what was hit does not work yet.

    Args:
        observer: of the run.
        injected: the fault.
        until_s: what came later (monotonic) is another fault's.
    """
    found, last_s = dict[str, float](), injected.over_s
    stages = STAGES[injected.fault.kind]
    if injected.target == FAR:  # which another supervisor keeps
        stages = tuple(one for one in stages if one.source != SUPERVISOR)
    is_killed = injected.fault.kind.startswith("kill")
    for stage in stages:
        ends_s = _end_s(observer, stage, injected, last_s)
        if ends_s is None or ends_s > until_s:
            if is_killed or stage is stages[-1]:
                return None
            continue
        ends_s = max(ends_s, last_s)
        found[stage.name] = ends_s - last_s
        last_s = ends_s
    return found


def back_s(observer: Observer, injected: Injected, until_s: float = math.inf) -> float | None:
    """Return the sum of `stage_seconds`."""
    found = stage_seconds(observer, injected, until_s)
    return None if found is None else round(sum(found.values()), 1)


def with_next(done: Sequence[Injected]) -> list[tuple[Injected, float]]:
    """Return faults one at a time, each with the time of the next one."""
    return list(zip(done, (*(one.at_s for one in done[1:]), math.inf), strict=True))


def _end_s(observer: Observer, stage: Stage, injected: Injected, after_s: float) -> float | None:
    """Return when a stage ended that began at `after_s`."""
    from_s = max(injected.at_s, after_s) - _DISORDER_S
    target = injected.target
    pattern = stage.pattern.replace("{target}", re.escape(target))
    match stage.source:
        case "process":
            times = iter(observer.started_s(target))
        case "group":
            late = (one for one in observer.groups if one.at_s > from_s)
            times = (one.at_s for one in late if re.search(pattern, " ".join(one.replicas)))
        case "step":
            times = iter(observer.steps_s)
        case source:
            lines = observer.lines[source.replace(_ITS_LOG, target)]
            times = (
                one.at_s for one in lines if one.at_s > from_s and re.search(pattern, one.text)
            )
    return min((at_s for at_s in times if at_s > from_s), default=None)


def stage_table(observer: Observer, done: Sequence[Injected]) -> dict[str, dict[str, list[float]]]:
    """Return p50 and p95 of each stage's seconds by kind of fault, and of their sum (`back`).

    Args:
        observer: of the run.
        done: faults one at a time, in order.
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    for injected, until_s in with_next(done):
        found = stage_seconds(observer, injected, until_s)
        if found is not None:
            kind = seconds.setdefault(injected.fault.kind, {})
            for name, each in (*found.items(), ("back", sum(found.values()))):
                kind.setdefault(name, []).append(each)
    return {
        kind: {
            name: [percentile(each, 0.5) or 0.0, percentile(each, 0.95) or 0.0]
            for name, each in _in_order(kind, stages).items()
        }
        for kind, stages in sorted(seconds.items())
    }


def table_lines(table: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return the table's lines for people."""
    return [
        f"{kind:<13} {name:<12} p50 {half:5.1f} s   p95 {most:5.1f} s"
        for kind, stages in table.items()
        for name, (half, most) in stages.items()
    ]


def _in_order(kind: str, stages: Mapping[str, list[float]]) -> dict[str, list[float]]:
    names = (*(stage.name for stage in STAGES[kind]), "back")
    return {name: stages[name] for name in names if name in stages}
