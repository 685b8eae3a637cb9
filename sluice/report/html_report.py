"""One self-contained page about a finished run: numbers, curves, samples before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from sluice.errors import ConfigError
from sluice.report.accounts_view import account_views
from sluice.report.curves import charts
from sluice.report.run_record import RunRecord, read_run
from sluice.report.summary import RunSummary

_NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class SamplePair:
    """Responses to one prompt by two versions; rows of the validation files."""

    prompt: str
    answer: str
    before: Mapping[str, object]
    after: Mapping[str, object]


def write_report(run_dir: Path, summary: RunSummary, file: Path) -> None:
    """Writes the page; it needs no network to be looked at and runs no script.

    Raises:
        DataError: the run did not reach its end.
        ConfigError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("reports need jinja2; install sluice[train]") from error
    record = read_run(run_dir)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        (files("sluice.report") / "report.html.jinja").read_text(encoding="utf-8")
    )
    page = template.render(
        name=run_dir.absolute().name,
        summary=summary,
        charts=charts(record),
        validation=_validation(record),
        samples=sample_pairs(run_dir, record),
        accounting=account_views(record.accounts),
    )
    file.write_text(page, encoding="utf-8")


def _validation(record: RunRecord) -> Mapping[str, int]:
    """First and last validated step, and the prompts of the validation set."""
    points = record.accuracies()
    rows = [row.get("val-aux/num_prompts") for row in record.validations]
    return {"first": points[0].step, "last": points[-1].step, "prompts": int(rows[-1] or 0)}


def sample_pairs(run_dir: Path, record: RunRecord) -> Sequence[SamplePair]:
    """Responses to the first prompts of the set by the first and the last validated version."""
    points = record.accuracies()
    steps = points[0].step, points[-1].step
    paths = [run_dir / "validation" / f"{step}.jsonl" for step in steps]
    if steps[0] == steps[1] or not all(path.is_file() for path in paths):
        return []
    before, after = map(_by_prompt, paths)
    shared = [prompt for prompt in before if prompt in after]
    return [
        SamplePair(prompt, str(before[prompt]["gts"]), before[prompt], after[prompt])
        for prompt in shared[:_NUM_SAMPLES]
    ]


def _by_prompt(file: Path) -> dict[str, Mapping[str, object]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    return {str(row["input"]): row for row in rows}
