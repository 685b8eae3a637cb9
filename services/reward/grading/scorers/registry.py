"""Choose the scorer of a data source: by the user's routes, else by verl's default routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from services.reward.grading.scorers import (
    boxed,
    exact_match,
    geo3k,
    gsm8k,
    math_dapo,
    program_tests,
    symbolic_math,
)
from sluice.data.scoring import (
    DEFAULT_ROUTES,
    EXACT_MATCH,
    PROGRAM_TESTS,
    refuses_truth,
    scorer_name,
)
from sluice.errors import ConfigError, DataError
from sluice.sandbox.choice import NO_SANDBOX

Rule = Callable[[str, str], object]
"""(response, ground truth) -> score, or a mapping with ``score``."""


class Scorer(Protocol):
    """Grades one response; returns a number, or a mapping with ``score`` and further keys."""

    def __call__(
        self,
        *,
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, object],
    ) -> object:
        """Grade."""
        ...


MATH_VERIFY = "math_verify"
RULES: Mapping[str, Rule] = {
    "math_dapo": math_dapo.compute_score,
    "math_dapo_0_6": partial(math_dapo.compute_score, boxed_fallback=False),
    "math_dapo_strict_box": partial(math_dapo.compute_score, strict_box_verify=True),
    "gsm8k": gsm8k.compute_score,
    "gsm8k_flexible": partial(gsm8k.compute_score, method="flexible"),
    "math_boxed": boxed.math_score,
    "geo3k": geo3k.compute_score,
    "multiple_choice": boxed.choice_score,
    EXACT_MATCH: exact_match.compute_score,
    MATH_VERIFY: symbolic_math.compute_score,
    PROGRAM_TESTS: program_tests.refuse_to_score,
}
"""Built-in scorers, by the name that routes use."""

TAILS: Mapping[str, int] = {
    **dict.fromkeys(
        ("math_dapo", "math_dapo_0_6", "math_dapo_strict_box"), math_dapo.SCORED_CHARACTERS
    ),
    **dict.fromkeys(("gsm8k", "gsm8k_flexible"), gsm8k.SCORED_CHARACTERS),
}
"""Scorers that read only the last characters of a response, and how many they read."""

_REMEDY = (
    "set reward.custom_reward_function.path to a Python file that defines "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"
)


def scorer_for(
    data_source: str,
    json_truth: str = "",
    *,
    routes: Mapping[str, str] | None = None,
    programs: Rule | None = None,
) -> Scorer:
    """Return the built-in scorer of a data source.

    Args:
        json_truth: the ground truth as JSON; empty if the row holds text.
        routes: the user's routes, by data source or prefix (``aime*``); they override verl's.
        programs: grades programs in the configured sandbox; ``None`` without one.

    Raises:
        DataError: no built-in scorer knows it, it needs a sandbox and there is none, the scorer's
            package is not installed, or the scorer cannot compare with such a ground truth.
        ConfigError: a route names no scorer.
    """
    name = _name(data_source, routes or {})
    if name is None:
        raise DataError(f"data_source '{data_source}': {_no_route(data_source)}")
    if refuses_truth(name, json_truth, is_json=bool(json_truth)):
        raise DataError(
            f"data_source '{data_source}': ground_truth is {json_truth:.80}, and the scorer "
            f"{name} compares with text alone; write the answer as text, or {_REMEDY}"
        )
    if name == MATH_VERIFY:
        symbolic_math.check_installed(f"data_source '{data_source}'")
    if name == PROGRAM_TESTS:
        if programs is None:
            raise DataError(f"data_source '{data_source}': {NO_SANDBOX}, or {_REMEDY}")
        return partial(_apply, programs)
    return partial(_apply, _rule(name))


def scored_characters(data_source: str, routes: Mapping[str, str]) -> int | None:
    """Return how many of a response's last characters its scorer reads; ``None``: all or none."""
    return TAILS.get(_name(data_source, routes) or "")


def check_routes(routes: Mapping[str, str]) -> None:
    """Refuse routes to unknown scorers; raise as `scorer_for` does."""
    for name in routes.values():
        _rule(name)


def _rule(name: str) -> Rule:
    if name not in RULES:
        raise ConfigError(
            f"reward.scorer_routes: no scorer is called '{name}'; choose one of {', '.join(RULES)}"
        )
    return RULES[name]


def _name(data_source: str, routes: Mapping[str, str]) -> str | None:
    return scorer_name(data_source, routes) or scorer_name(data_source, DEFAULT_ROUTES)


def _no_route(data_source: str) -> str:
    return f"no built-in scorer knows it (known: {', '.join(sorted(DEFAULT_ROUTES))}); {_REMEDY}"


def _apply(rule: Rule, *, solution_str: str, ground_truth: str, **_call: object) -> object:
    return rule(solution_str, ground_truth)
