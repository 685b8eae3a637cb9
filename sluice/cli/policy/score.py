"""`sluice score`: grade responses with the scorers of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sluice.cli.arguments import AsJsonLines, Deadline, RunArgument, RunOption, named_run
from sluice.cli.running_run import connect_client
from sluice.cli.terminal import print_json
from sluice.client.scoring import ScoreItem
from sluice.data.row_files import read_rows
from sluice.safe_text import printable
from sluice.types import Failed, Scored

_NEEDS = "data_source, response and ground_truth, each a text; extra_info and question are optional"


class _ScoreRow(msgspec.Struct):
    data_source: str
    response: str
    ground_truth: str
    extra_info: dict[str, Any] | None = None
    question: str | None = None


def score(
    file: Annotated[Path, typer.Argument(help="JSON lines or parquet, one response per row.")],
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    deadline: Deadline = None,
    as_json: AsJsonLines = False,
) -> None:
    """Grade responses with the scorers of a running run, without training on them.

    \b
    A line of the file; extra_info for the scorer, and question (the prompt's last turn) for a
    reward model are optional:
      {"data_source": "math_dapo", "ground_truth": "9", "response": "Answer: 9"}

    Prints one line per response, in order, then the mean on stderr. The exit code is 1 if a
    response could not be graded.

    \b
    Example:
      sluice score responses.jsonl --run runs/quickstart
    """
    items = [
        ScoreItem(
            row.data_source,
            row.response,
            row.ground_truth,
            row.extra_info or {},
            row.question or "",
        )
        for _, row in read_rows(file, _ScoreRow, _NEEDS)
    ]
    outcomes = asyncio.run(_score(named_run(run, run_option), items, deadline))
    for index, outcome in enumerate(outcomes):
        if as_json:
            print_json(_as_object(outcome))
        else:
            typer.echo(f"[{index}] {_outcome_line(outcome)}")
    scores = [outcome.score for outcome in outcomes if isinstance(outcome, Scored)]
    mean = f", mean score {sum(scores) / len(scores):.4f}" if scores else ""
    typer.echo(f"{len(scores)} of {len(outcomes)} graded{mean}", err=True)
    if len(scores) < len(outcomes):
        raise typer.Exit(1)


async def _score(
    run: Path, items: list[ScoreItem], deadline_s: float | None
) -> list[Scored | Failed]:
    async with connect_client(run) as client:
        return await client.score(items, deadline_s=deadline_s)


def _outcome_line(outcome: Scored | Failed) -> str:
    if isinstance(outcome, Failed):
        return printable(f"failed: {outcome.kind}: {outcome.detail}")
    metrics = " ".join(f"{name}={value:g}" for name, value in sorted(outcome.metrics.items()))
    prediction = "" if outcome.prediction is None else f" prediction {outcome.prediction!r}"
    return printable(f"score {outcome.score:g} {metrics}{prediction}".replace("  ", " "))


def _as_object(outcome: Scored | Failed) -> dict[str, object]:
    if isinstance(outcome, Failed):
        return {"failure": outcome.kind.value, "detail": outcome.detail}
    return {
        "score": outcome.score,
        "reward": outcome.reward,
        "metrics": dict(outcome.metrics),
        "prediction": outcome.prediction,
    }
