"""Rules on guards: each needs one condition, a measured metric, and perhaps checkpoints."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from sluice.algorithm.guards import VALIDATION_PREFIX
from sluice.config.problems import Problem
from sluice.config.run import RunConfig
from sluice.config.schema.service import GuardRuleConfig
from sluice.telemetry.metric_names import find_metric, metrics

_KEY = "sluice.guards"
_CONDITIONS = ("target", "limit", "deviations")


def guard_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield rules that contradict themselves, or that no run with these settings can follow."""
    guards = config.sluice.guards
    if guards.keep.metric is not None and not _is_of_validations(guards.keep.metric):
        yield Problem(
            f"{_KEY}.keep.metric",
            guards.keep.metric,
            "is no metric of validations, and checkpoints are compared by those",
            f"name one that begins with {VALIDATION_PREFIX}, or set it to null: held-out accuracy",
        )
    yield from _unknown_metric_problems(f"{_KEY}.keep.metric", guards.keep.metric)
    for number, rule in enumerate(guards.rules):
        key = f"{_KEY}.rules[{number}]"
        yield from _unknown_metric_problems(f"{key}.metric", rule.metric)
        yield from _finite_problems(key, rule)
        yield from _condition_problems(key, rule)
        yield from _requirement_problems(key, rule, config)


def _is_of_validations(metric: str | None) -> bool:
    return metric is None or metric.startswith(VALIDATION_PREFIX)


def _unknown_metric_problems(key: str, metric: str | None) -> Iterator[Problem]:
    if metric is None or find_metric(metric) is not None:
        return
    names = [entry.name for section in metrics().values() for entry in section]
    nearest = difflib.get_close_matches(metric, names, n=3)
    yield Problem(
        key,
        metric,
        "is no metric of a run",
        f"name one of docs/metrics.md{', such as ' if nearest else ''}{', '.join(nearest)}",
    )


def _finite_problems(key: str, rule: GuardRuleConfig) -> Iterator[Problem]:
    for name in _CONDITIONS:
        value = getattr(rule, name)
        if value is not None and not math.isfinite(value):
            yield Problem(
                f"{key}.{name}", value, "can never be compared with", "set a finite number"
            )


def _condition_problems(key: str, rule: GuardRuleConfig) -> Iterator[Problem]:
    conditions = [name for name in _CONDITIONS if getattr(rule, name) is not None]
    if len(conditions) != 1:
        yield Problem(
            key,
            rule.action,
            f"has {' and '.join(conditions) or 'no condition'}",
            f"set exactly one of {', '.join(_CONDITIONS)}",
        )
    if rule.target is not None and rule.action != "stop":
        yield Problem(
            f"{key}.action",
            rule.action,
            f"with target = {rule.target}: a good value is a reason to stop a run only",
            "set action to stop, or give a limit instead of the target",
        )
    if rule.window > 1 and _is_of_validations(rule.metric):
        yield Problem(
            f"{key}.window",
            rule.window,
            "with a metric of validations, whose values have a standard error of their own",
            "leave window out; times asks for several values in a row",
        )
    if rule.deviations is not None and rule.window < 2 and not _is_of_validations(rule.metric):
        yield Problem(
            f"{key}.window",
            rule.window,
            f"with deviations = {rule.deviations}: one step's {rule.metric} has no standard error",
            "set window to some steps, such as 10",
        )


def _requirement_problems(key: str, rule: GuardRuleConfig, config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    validates = config.data.val_files is not None and trainer.test_freq > 0
    if _is_of_validations(rule.metric) and not validates:
        yield Problem(
            f"{key}.metric",
            rule.metric,
            "is measured by validations, and the run has none",
            "set data.val_files and trainer.test_freq, or watch a metric of train steps",
        )
    if rule.action != "rollback":
        return
    intervals = sorted((trainer.save_freq, trainer.test_freq))
    if not validates or intervals[0] <= 0 or intervals[1] % intervals[0]:
        yield Problem(
            f"{key}.action",
            rule.action,
            "needs checkpoints that were validated, and "
            f"trainer.save_freq = {trainer.save_freq}, trainer.test_freq = {trainer.test_freq}",
            "set data.val_files, trainer.test_freq, and trainer.save_freq to a multiple of it",
        )
    if config.sluice.guards.keep.top == 0:
        yield Problem(
            f"{_KEY}.keep.top",
            0,
            "keeps no checkpoint that a rollback could restore",
            "set it to 1 or more",
        )
