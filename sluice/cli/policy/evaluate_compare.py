"""`sluice eval compare`: evaluations beside each other, on the console and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.arguments import AsJson
from sluice.cli.policy.kept_checkpoints import steps_with
from sluice.cli.terminal import output_console, print_json, print_table
from sluice.errors import DataError
from sluice.evaluation.comparison import (
    ComparedBenchmark,
    Evaluation,
    compared_benchmarks,
    comparison_object,
    read_evaluations,
)
from sluice.evaluation.page import USUAL_PROMPTS, USUAL_RESPONSES, write_page
from sluice.evaluation.statistics import estimate_text
from sluice.evaluation.stored_responses import FOLDER_NAME
from sluice.safe_text import printable

Evaluations = Annotated[
    list[Path],
    typer.Argument(metavar="DIR", help="--output folders of evaluations, or of --follow."),
]


def compare_evaluations(
    folders: Evaluations,
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page with responses here.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of a benchmark with responses on the page.")
    ] = USUAL_PROMPTS,
    responses: Annotated[
        int, typer.Option(min=1, help="Responses of a prompt on the page, for each evaluation.")
    ] = USUAL_RESPONSES,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations: means, pass@k and differences, each with its standard error.

    Differences are from the first evaluation, over the prompts that both have. The page shows the
    responses to a prompt beside each other, prompts that differ most first; it is one file without
    scripts. An evaluation that still runs is compared as far as it got.

    \b
    Examples:
      sluice eval compare runs/base-eval runs/trained-eval
      sluice eval compare runs/one/evaluations --output curve.html
    """
    evaluations = read_evaluations([one for folder in folders for one in _expanded(folder)])
    benchmarks = compared_benchmarks(evaluations)
    if output is not None:
        write_page(evaluations, output, most_prompts=prompts, most_responses=responses)
    if as_json:
        found = comparison_object(evaluations, benchmarks)
        print_json(found | ({} if output is None else {"page": str(output)}))
        return
    console = output_console()
    for benchmark in benchmarks:
        _print(console, evaluations, benchmark)
    if output is not None:
        typer.echo(f"page: {output}")


def _expanded(folder: Path) -> list[Path]:
    """Return the evaluations in a folder of `sluice eval --follow`, the first step first."""
    if folder.is_file():
        raise DataError(f"{folder}: is a file; give {folder.parent} for all evaluations in it")
    steps = steps_with(folder, FOLDER_NAME)
    return [folder / f"global_step_{step}" for step in steps] or [folder]


def _print(
    console: Console, evaluations: Sequence[Evaluation], benchmark: ComparedBenchmark
) -> None:
    largest = max((k for one in benchmark.results if one for k in one.pass_at_k), default=1)
    mean, passes = f"mean {benchmark.variable}", f"pass@{largest}"
    columns = ["evaluation", mean, "difference", passes, "prompts", "without a grade"]
    rows = []
    for number, (one, found) in enumerate(zip(evaluations, benchmark.results, strict=True)):
        if found is not None:
            state = "" if one.results is not None else " (has not ended)"
            rows.append(
                (
                    printable(one.label) + state,
                    estimate_text(found.mean),
                    estimate_text(benchmark.differences[number], signed=True),
                    estimate_text(found.pass_at_k.get(largest)),
                    f"{found.prompts:,}",
                    f"{found.failed_samples:,}",
                )
            )
    print_table(console, printable(benchmark.name), columns, rows, right=columns[1:])
