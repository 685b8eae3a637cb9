"""Guards of a run: rules on its metrics, and the action when a rule is broken.

A signal is one value of a metric with its standard error, or the reason for which there is none. No
value and a bad value are different things: a validation that failed, a peer that is away and a
metric that never appears break no rule. They are shown.

A rule compares the newest values with a target, with a limit, or with the best value so far, in
standard errors of the difference of the two. A rule is broken if its last `times` values are all
beyond. Values from before a rollback, and from before a hold that a user ended, count as best ones
but break no rule again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from statistics import stdev
from typing import Literal

Better = Literal["max", "min"]

VALIDATION_PREFIX = "val-"
"""The prefix of validation metrics; all others belong to train steps."""

ACCURACY = "held-out accuracy"
"""The metric of a rule that names none: the mean of ``mean@N`` over data sources."""

_CORE = "val-core/"
_MEAN = "/mean@"
_ACC = "/acc/mean@"


class GuardAction(StrEnum):
    """The action after a broken rule."""

    HOLD = "hold"
    STOP = "stop"
    ROLLBACK = "rollback"


class RuleState(StrEnum):
    """The state of a rule, by its newest values."""

    WATCHING = "watching"
    NO_SIGNAL = "no signal"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Signal:
    """One value of a metric.

    Attributes:
        step: step of the validated weights, or of the train step.
        value: ``None`` if there is none; see `absence`.
        standard_error: standard error of the value, if known.
        absence: why there is no value.
    """

    step: int
    value: float | None = None
    standard_error: float | None = None
    absence: str = ""

    @property
    def text(self) -> str:
        """The value as text."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3g}"
        return f"{self.value or 0.0:.4g}{error} at step {self.step}"


@dataclass(frozen=True, slots=True)
class GuardRule:
    """One rule; exactly one of `target`, `limit` and `deviations` is set.

    Attributes:
        metric: the metric's name; ``None`` for held-out accuracy.
        target: fires at a value that is at least as good. For `stop`.
        limit: broken by a value that is worse.
        deviations: broken by a value that is worse than the best one by more than so many standard
            errors of the difference.
        times: how many values in a row it takes.
        window: number of steps that a value of a train step's metric averages.
        most_rollbacks: rollbacks of the run after which a broken rule holds it instead.
    """

    action: GuardAction
    metric: str | None = None
    better: Better = "max"
    target: float | None = None
    limit: float | None = None
    deviations: float | None = None
    times: int = 1
    window: int = 1
    learning_rate_factor: float = 0.5
    most_rollbacks: int = 2

    @property
    def name(self) -> str:
        """The name of the metric, or a description if it has none."""
        return self.metric or ACCURACY

    @property
    def text(self) -> str:
        """The rule as text."""
        if self.target is not None:
            way = f"reaches {self.target:g}"
        elif self.limit is not None:
            way = f"is {'below' if self.better == 'max' else 'above'} {self.limit:g}"
        else:
            way = f"is worse than its best by more than {self.deviations:g} standard errors"
        often = f", {self.times} times in a row" if self.times > 1 else ""
        return f"{self.action} when {self.name} {way}{often}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The state of a rule, and the comparison or the reason for it."""

    state: RuleState
    detail: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """The weights of `restored` became version `version`, and the learning rate lower."""

    version: int
    restored: int
    learning_rate_factor: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """The state of the guards, which survives a restart.

    Attributes:
        signals: by name of the metric, in the order of steps.
        resumed_after: by metric name, the step of the newest value when a user ended a hold.
        saved: steps whose checkpoints are this run's; an earlier run may have left others.
    """

    signals: Mapping[str, tuple[Signal, ...]] = field(default_factory=dict)
    rollbacks: tuple[Rollback, ...] = ()
    resumed_after: Mapping[str, int] = field(default_factory=dict)
    saved: tuple[int, ...] = ()

    def counts_after(self, name: str) -> int:
        """Return the step whose later signals of a metric can break a rule."""
        rolled_back = self.rollbacks[-1].version - 1 if self.rollbacks else -1
        return max(rolled_back, self.resumed_after.get(name, -1))

    def with_signals(self, signals: Mapping[str, Signal]) -> GuardRecord:
        """Return the record with newer signals; a value replaces the former one of its step."""
        added = {
            name: (
                *(
                    s
                    for s in self.signals.get(name, ())
                    if signal.value is None or s.step != signal.step
                ),
                signal,
            )
            for name, signal in signals.items()
        }
        return replace(self, signals={**self.signals, **added})

    def until_step(self, step: int) -> GuardRecord:
        """Return the record of a run that resumes from a checkpoint of `step`."""
        return GuardRecord(
            {
                name: tuple(signal for signal in signals if signal.step <= step)
                for name, signals in self.signals.items()
            },
            tuple(rollback for rollback in self.rollbacks if rollback.version <= step),
            {name: min(resumed_step, step) for name, resumed_step in self.resumed_after.items()},
            tuple(saved_step for saved_step in self.saved if saved_step <= step),
        )

    @property
    def learning_rate_factor(self) -> float:
        """The product over all rollbacks."""
        return math.prod(rollback.learning_rate_factor for rollback in self.rollbacks)

    def steps_in_weights(self, version: int) -> int:
        """Return the train batches that made the weights of a version.

        A rollback takes a version but trains no batch, and the batches after the version that it
        restores are gone.
        """
        num_steps = 0
        for rollback in reversed(self.rollbacks):
            if rollback.version <= version:
                num_steps += version - rollback.version
                version = rollback.restored
        return num_steps + version


@dataclass(frozen=True, slots=True)
class Verdict:
    """The action that a broken rule requires.

    Attributes:
        restores: of a rollback: the step of the checkpoint.
    """

    action: GuardAction
    reason: str
    restores: int = -1
    learning_rate_factor: float = 1.0


def signal_of(
    metric: str | None,
    step: int,
    values: Mapping[str, float],
    standard_errors: Mapping[str, float],
) -> Signal:
    """Return the signal of a metric in a row of metrics.

    Args:
        metric: its name; ``None``: held-out accuracy, the mean over data sources of ``acc``, or of
            ``reward`` where no scorer gives ``acc``.
        standard_errors: by name, of some of `values`.
    """
    names = [metric] if metric is not None else _accuracy_names(values)
    present = [values[name] for name in names if name in values]
    if not present:
        missing = "has no accuracy" if metric is None else f"has no metric {metric}"
        return Signal(step, absence=f"the row of step {step} {missing}")
    if any(map(math.isnan, present)):
        return Signal(step, absence=f"the value of step {step} is not a number")
    errors = [standard_errors[name] for name in names if name in standard_errors]
    combined = math.hypot(*errors) / len(present) if len(errors) == len(present) else None
    return Signal(step, sum(present) / len(present), combined)


def _accuracy_names(values: Mapping[str, float]) -> list[str]:
    core = [name for name in values if name.startswith(_CORE) and _MEAN in name]
    return [name for name in core if _ACC in name] or core


def moving_means(signals: Sequence[Signal], window: int) -> list[Signal]:
    """Return the means of each `window` values in a row, with the standard error of the mean.

    A value without its window full is left out, and a missing value stays missing. A window of 1
    changes nothing.
    """
    if window == 1:
        return list(signals)
    means: list[Signal] = []
    values: list[float] = []
    for signal in signals:
        if signal.value is None:
            means.append(signal)
            continue
        values = [*values[1 - window :], signal.value]
        if len(values) == window:
            error = stdev(values) / math.sqrt(window) if all(map(math.isfinite, values)) else None
            means.append(Signal(signal.step, sum(values) / window, error))
    return means


def best_signal(signals: Sequence[Signal], better: Better, window: int = 1) -> Signal | None:
    """Return the best finite value, of equal ones the newest; ``None`` without any.

    With a `window` it is the best mean, as of `moving_means`.
    """
    finite_signals = [
        signal for signal in signals if signal.value is not None and math.isfinite(signal.value)
    ]
    totals = [_oriented_value(signal, better) for signal in finite_signals]
    if window > 1:  # from sums of prefixes: the history of a run is long
        sums = [0.0, *accumulate(totals)]
        totals = [after - before for before, after in zip(sums, sums[window:], strict=False)]
    if not totals:
        return None
    newest = len(totals) - 1 - totals[::-1].index(max(totals))
    return moving_means(finite_signals[newest : newest + window], window)[-1]


def best_steps(
    signals: Sequence[Signal], better: Better, saved: Collection[int], top: int
) -> tuple[int, ...]:
    """Return the steps of the `top` best values among the `saved` checkpoints, the best first."""
    saved_signals = [
        signal for signal in signals if signal.value is not None and signal.step in saved
    ]
    ranked = sorted(
        saved_signals,
        key=lambda signal: (_oriented_value(signal, better), signal.step),
        reverse=True,
    )
    return tuple(signal.step for signal in ranked[:top])


def judge(rule: GuardRule, record: GuardRecord) -> Judgement:
    """Compare a rule's newest values."""
    signals = record.signals.get(rule.name, ())
    counted = _newest(rule, signals, record.counts_after(rule.name))
    if not counted:
        return Judgement(RuleState.NO_SIGNAL, f"{rule.name} has no value yet")
    newest = counted[-1]
    if newest.value is None:
        return Judgement(RuleState.NO_SIGNAL, newest.absence)
    best = _best(rule, signals)
    newest_values = [signal for signal in counted if signal.value is not None]
    beyond = [_is_beyond(rule, signal, best) for signal in newest_values]
    if None in beyond:
        return Judgement(RuleState.NO_SIGNAL, f"{rule.name} = {newest.text}: no standard error")
    versus = "" if best is None else f", best {best.text}"
    detail = f"{rule.name} = {newest.text}{versus}"
    is_broken = len(newest_values) == rule.times and all(beyond)
    return Judgement(RuleState.BROKEN if is_broken else RuleState.WATCHING, detail)


def decide(
    rules: Sequence[GuardRule], record: GuardRecord, restorable: Sequence[int]
) -> Verdict | None:
    """Return the action of the first broken rule, if any.

    An impossible rollback becomes a hold. It restores no step whose own value breaks the same rule:
    the collapse may be in it.

    Args:
        rules: in the order of their importance.
        restorable: steps of checkpoints that were validated, the best first.
    """
    for rule in rules:
        judgement = judge(rule, record)
        if judgement.state is not RuleState.BROKEN:
            continue
        reason = f"{rule.text}: {judgement.detail}"
        if rule.action is not GuardAction.ROLLBACK:
            return Verdict(rule.action, reason)
        signals = record.signals.get(rule.name, ())
        restored = next((step for step in restorable if not _breaks(rule, signals, step)), None)
        if restored is None:
            return Verdict(
                GuardAction.HOLD, f"{reason}; no checkpoint with a good validation is left"
            )
        if len(record.rollbacks) >= rule.most_rollbacks:
            times = len(record.rollbacks)
            return Verdict(GuardAction.HOLD, f"{reason}; rolled back {times} times already")
        return Verdict(rule.action, reason, restored, rule.learning_rate_factor)
    return None


def _newest(rule: GuardRule, signals: Sequence[Signal], after: int) -> list[Signal]:
    """Return the last `times` values of a rule after a step, with what is missing among them."""
    num_needed = rule.window + rule.times - 1
    newest: list[Signal] = []
    for signal in reversed(signals):
        if signal.step <= after or not num_needed:
            break
        newest.append(signal)
        num_needed -= signal.value is not None
    return moving_means(newest[::-1], rule.window)


def _best(rule: GuardRule, signals: Sequence[Signal]) -> Signal | None:
    """Return the value that a rule compares with, if it compares with the best one."""
    return None if rule.deviations is None else best_signal(signals, rule.better, rule.window)


def _breaks(rule: GuardRule, signals: Sequence[Signal], step: int) -> bool:
    """Return whether the value of a step is beyond; without a value it is not."""
    until = [signal for signal in signals if signal.step <= step and signal.value is not None][
        -rule.window :
    ]
    values = moving_means(until, rule.window)
    if not values or values[-1].step != step:
        return False
    return bool(_is_beyond(rule, values[-1], _best(rule, signals)))


def _oriented_value(signal: Signal, better: Better) -> float:
    assert signal.value is not None
    return signal.value if better == "max" else -signal.value


def _is_beyond(rule: GuardRule, signal: Signal, best: Signal | None) -> bool | None:
    """Return whether a value breaks a rule; ``None``: without standard errors nothing can say."""
    goodness = _oriented_value(signal, rule.better)
    sign = 1.0 if rule.better == "max" else -1.0
    if rule.target is not None:
        return goodness >= sign * rule.target
    if rule.limit is not None:
        return goodness < sign * rule.limit
    if not math.isfinite(goodness):
        return goodness < 0.0
    if best is None or signal.standard_error is None or best.standard_error is None:
        return None
    error = math.hypot(signal.standard_error, best.standard_error)
    return _oriented_value(best, rule.better) - goodness > (rule.deviations or 0.0) * error
