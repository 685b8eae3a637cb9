"""What rules of guards need: one condition each, metrics that are measured, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.algorithm.guards import VALIDATION_PREFIX
from sluice.config.problems import Problem
from sluice.config.run import RunConfig
from sluice.config.schema.guards import GuardRuleConfig

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
    for number, rule in enumerate(guards.rules):
        key = f"{_KEY}.rules[{number}]"
        yield from _conditions(key, rule)
        yield from _needs(key, rule, config)


def _is_of_validations(metric: str | None) -> bool:
    return metric is None or metric.startswith(VALIDATION_PREFIX)


def _conditions(key: str, rule: GuardRuleConfig) -> Iterator[Problem]:
    given = [name for name in _CONDITIONS if getattr(rule, name) is not None]
    if len(given) != 1:
        yield Problem(
            key,
            rule.action,
            f"has {' and '.join(given) or 'no condition'}",
            f"set exactly one of {', '.join(_CONDITIONS)}",
        )
    if rule.target is not None and rule.action != "stop":
        yield Problem(
            f"{key}.action",
            rule.action,
            f"with target = {rule.target}: a good value is no reason to {rule.action} a run",
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


def _needs(key: str, rule: GuardRuleConfig, config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    validates = config.data.val_files is not None and trainer.test_freq > 0
    if _is_of_validations(rule.metric) and not validates:
        yield Problem(
            f"{key}.metric",
            rule.metric,
            "is measured by validations, and the run has none",
            "set data.val_files and trainer.test_freq, or watch a metric of train steps",
        )
    if rule.action == "rollback" and (trainer.save_freq <= 0 or not validates):
        yield Problem(
            f"{key}.action",
            rule.action,
            "needs checkpoints that were validated",
            "set data.val_files, trainer.test_freq, and trainer.save_freq to a multiple of it",
        )
