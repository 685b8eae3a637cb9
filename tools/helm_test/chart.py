"""The chart through Helm's own engine; the one file that imports it."""

from __future__ import annotations

from typing import Any

import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint

from tools.helm_test.value_sets import CHART

NAMESPACE = "training"
_SUFFIXES = (".yaml", ".yml")


class RefusedError(Exception):
    """Helm takes the values or a template not; says which."""


def lint_problems(values: dict[str, Any]) -> list[str]:
    """What Helm's linter finds, warnings included."""
    report = lint(CHART, values, strict=True, namespace=NAMESPACE)
    found = [str(each) for each in report["errors"]]
    # Without an icon the chart is as good; Helm says so at severity 1.
    found += [f"{m['path']}: {m['error']}" for m in report["messages"] if m["severity"] > 1]
    return found


def render(
    values: dict[str, Any], release: str, revision: int = 1
) -> tuple[list[dict[str, Any]], str]:
    """All objects in the order of their files, and the notes.

    Args:
        values: above the chart's own.
        release: the release's name.
        revision: 1 as it is installed, more after each upgrade.

    Raises:
        RefusedError: values or templates are refused.
    """
    try:
        with Chart.load(CHART) as chart:
            chart.validate_schema(values)
            texts = chart.render(
                values,
                name=release,
                namespace=NAMESPACE,
                revision=revision,
                is_install=revision == 1,
                is_upgrade=revision > 1,
            )
    except HelmError as error:
        raise RefusedError(str(error)) from error
    files = {name: text for name, text in texts.items() if name.endswith(_SUFFIXES)}
    notes = next(text for name, text in texts.items() if name.endswith("NOTES.txt"))
    loaded = [each for name in sorted(files) for each in yaml.safe_load_all(files[name])]
    return [each for each in loaded if each is not None], notes


def refusal(values: dict[str, Any]) -> str | None:
    """What Helm says against the values; None if it takes them."""
    try:
        render(values, "sluice")
    except RefusedError as error:
        return str(error)
    return None
