"""One self-contained page about a finished run: numbers, curves, samples before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import jinja2

from sluice.report.curves import accuracy_curve, composition_chart, time_split, token_curve
from sluice.report.run_record import read_run
from sluice.report.summary import RunSummary

_NUM_SAMPLES = 8


def write_report(run_dir: Path, summary: RunSummary, file: Path) -> None:
    """Writes the page; it needs no network to be looked at.

    Raises:
        DataError: the run did not reach its end.
        ConfigError: matplotlib is not installed.
    """
    record = read_run(run_dir)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        (files("sluice.report") / "report.html.jinja").read_text(encoding="utf-8")
    )
    charts = [draw(record) for draw in (accuracy_curve, composition_chart, token_curve, time_split)]
    page = template.render(
        name=run_dir.name, summary=summary, charts=charts, samples=_samples(run_dir / "validation")
    )
    file.write_text(page, encoding="utf-8")


def _samples(folder: Path) -> Sequence[Mapping[str, object]]:
    """Responses to the same prompts by the first and by the last validated version."""
    steps = sorted(int(file.stem) for file in folder.glob("*.jsonl"))
    if not steps:
        return []
    before, after = (_by_prompt(folder / f"{step}.jsonl") for step in (steps[0], steps[-1]))
    shared = [prompt for prompt in before if prompt in after]
    return [
        {"prompt": prompt, "before": before[prompt], "after": after[prompt]}
        for prompt in shared[:_NUM_SAMPLES]
    ]


def _by_prompt(file: Path) -> dict[str, Mapping[str, object]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {str(row["input"]): row for row in rows}
