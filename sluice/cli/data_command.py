"""`sluice data`: published data sets to verl's format, and a look at what a file holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.cli.data_view import inspection_as_json, print_inspection, print_prepared
from sluice.cli.plain_table import output_console
from sluice.cli.prompt_tokens import token_counter
from sluice.data.inspection import inspect_files
from sluice.data.prepare import Preparation, prepare
from sluice.data.prompt_files import open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.data.published_rows import PUBLISHED_SETS, Wishes
from sluice.data.raw_rows import check_raw_file
from sluice.vision.image_limits import DEFAULT_LIMITS
from sluice.vision.row_images import images_of_row

SetName = Literal["dapo-math-17k", "aime-2024", "math-500", "gsm8k", "geo3k", "dianjin", "jsonl"]

data_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Prepare data sets for training and inspect them; nothing is downloaded.\n\n"
    "\b\nExample:\n  sluice data inspect train.parquet",
)


@data_commands.command("prepare")
def prepare_set(  # noqa: PLR0913 - one parameter an option
    name: Annotated[SetName, typer.Argument(help="What the input files are.")],
    *,
    inputs: Annotated[
        list[Path], typer.Option("--input", help="File as published; repeat for several, in order.")
    ],
    output: Annotated[Path, typer.Option("--output", help="Folder to write to.")],
    split: Annotated[
        str | None, typer.Option(help="Name of the split; none: the usual one of the set.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows to write at most.")] = None,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Leave out rows with the same prompt and answer.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows that cannot be used.")
    ] = False,
    data_source: Annotated[
        str | None, typer.Option(help="What routes rows to a scorer; none: the set's name.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Text beside every question in place of the set's own.")
    ] = None,
    prompt_field: Annotated[
        str, typer.Option(help="jsonl: field with the question, unless rows are in verl's format.")
    ] = "prompt",
    answer_field: Annotated[
        str, typer.Option(help="jsonl: field with the right answer, likewise.")
    ] = "answer",
) -> None:
    """Turn files as they were published into a Parquet file in verl's format.

    \b
    Examples:
      sluice data prepare dapo-math-17k --input dapo-math-17k.parquet --output data --deduplicate
      sluice data prepare gsm8k --input test.parquet --output data --split test
      sluice data prepare jsonl --input mine.jsonl --output data --data-source math_dapo
    """
    published = PUBLISHED_SETS[name]
    split = split or published.split
    stem = inputs[0].stem if name == "jsonl" else name
    order = Preparation(
        name,
        tuple(inputs),
        output / f"{stem}-{split}.parquet",
        Wishes(
            split,
            data_source or published.data_source or stem,
            instruction,
            prompt_field,
            answer_field,
        ),
        limit,
        deduplicate,
        skip_bad,
    )
    with _progress("preparing", None) as advance:
        made = prepare(order, lambda _num_read: advance(1))
    print_prepared(output_console(), str(order.output), made)


@data_commands.command("inspect")
def inspect(
    file: Annotated[Path, typer.Argument(help="A .parquet, .json or .jsonl file.")],
    *,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder; prompts are then measured in tokens too.")
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 0,
    prompt_key: Annotated[str, typer.Option(help="Column with the messages.")] = "prompt",
    reward_fn_key: Annotated[
        str, typer.Option(help="Column that routes a row to its scorer.")
    ] = "data_source",
    image_key: Annotated[str, typer.Option(help="Column with images, if there is one.")] = "images",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count what a file holds: data sources and their scorers, lengths, copies, unusable rows.

    Images are read, and must be within the limits that sluice.limits has by default.
    The exit code is 1 if a row cannot be used.

    \b
    Example:
      sluice data inspect train.parquet --tokenizer models/Qwen3-8B --head 2
    """
    columns = PromptColumns(prompt_key, reward_fn_key, images=image_key)
    files = open_prompt_files([str(file)], columns, config_key="FILE")
    measure = None if tokenizer is None else token_counter(tokenizer)
    with _progress("reading", files.num_rows) as advance:
        found = inspect_files(
            files,
            measure_tokens=measure,
            check_row=partial(images_of_row, limits=DEFAULT_LIMITS),
            num_head=head,
            on_rows=advance,
        )
    names = check_raw_file(file)
    if as_json:
        typer.echo(json.dumps(inspection_as_json(str(file), names, found), sort_keys=True))
    else:
        print_inspection(output_console(), str(file), ", ".join(names), found)
    if found.num_bad:
        raise typer.Exit(1)


@contextmanager
def _progress(task: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal; the function advances it by rows."""
    console = Console(stderr=True)
    shown = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *shown,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bars:
        bar = bars.add_task(task, total=total)
        yield lambda rows: bars.advance(bar, rows)
