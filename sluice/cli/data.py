"""`sluice data`: convert published data sets to verl's format, and inspect files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from sluice.cli.arguments import AsJson
from sluice.cli.terminal import output_console, print_json, print_line, print_table, show_count
from sluice.config.schema.data import file_list
from sluice.data.inspection import (
    QUANTILES,
    Inspection,
    Lengths,
    MeasureTokens,
    inspect_files,
    quantiles,
)
from sluice.data.prepare import PUBLISHED_SETS, PrepareJob, PrepareOptions, PrepareResult, prepare
from sluice.data.prompt_files import open_prompt_files
from sluice.data.prompt_rows import PromptColumns, PromptRow
from sluice.data.row_files import check_raw_file
from sluice.data.scoring import scorer_name
from sluice.errors import ConfigError, DataError
from sluice.safe_text import printable
from sluice.types import ChatMessage
from sluice.vision.image_files import images_of_row
from sluice.vision.image_limits import DEFAULT_LIMITS

NO_SCORER = "none"
_HEAD_CHARACTERS = 400
_QUANTILE_NAMES = tuple(
    {0.0: "least", 0.5: "median", 1.0: "most"}.get(q, f"{q:.0%}") for q in QUANTILES
)
SetName = Literal["dapo-math-17k", "aime-2024", "math-500", "gsm8k", "geo3k", "dianjin", "jsonl"]

data_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Prepare data sets for training, and inspect them. Nothing is downloaded.\n\n"
    "\b\nExample:\n  sluice data inspect train.parquet",
)


@data_commands.command("prepare")
def prepare_set(  # noqa: PLR0913 - one parameter per option
    name: Annotated[SetName, typer.Argument(help="The data set of the input files.")],
    *,
    inputs: Annotated[
        list[Path], typer.Option("--input", help="A file as published; repeatable, in order.")
    ],
    output: Annotated[Path, typer.Option("--output", help="Folder to write to.")],
    split: Annotated[
        str | None, typer.Option(help="Name of the split; none: the usual one of the data set.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum rows to write.")] = None,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Drop rows with the same prompt and answer.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Drop rows that cannot be used.")
    ] = False,
    data_source: Annotated[
        str | None,
        typer.Option(help="Name that routes rows to a scorer; none: that of the data set."),
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Text beside every question; none: the data set's own.")
    ] = None,
    prompt_field: Annotated[
        str, typer.Option(help="jsonl: field with the question; ignored for rows in verl's format.")
    ] = "prompt",
    answer_field: Annotated[
        str, typer.Option(help="jsonl: field with the right answer; also ignored there.")
    ] = "answer",
    as_json: AsJson = False,
) -> None:
    """Convert published files into a Parquet file in verl's format.

    \b
    Examples:
      sluice data prepare dapo-math-17k --input dapo-math-17k.parquet --output data --deduplicate
      sluice data prepare gsm8k --input test.parquet --output data --split test
      sluice data prepare jsonl --input mine.jsonl --output data --data-source math_dapo
    """
    published = PUBLISHED_SETS[name]
    split = split or published.split
    stem = inputs[0].stem if name == "jsonl" else name
    source = data_source or published.data_source or stem
    job = PrepareJob(
        name,
        tuple(inputs),
        output / f"{stem}-{split}.parquet",
        PrepareOptions(split, source, instruction, prompt_field, answer_field),
        limit,
        deduplicate,
        skip_bad,
    )
    with show_count("preparing", None) as advance:
        result = prepare(job, lambda _num_read: advance(1))
    if as_json:
        print_json({"output": str(job.output), **asdict(result)})
    else:
        print_prepared(output_console(), str(job.output), result)


@data_commands.command("inspect")
def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help=".parquet, .json or .jsonl files, or patterns; read in order."
        ),
    ],
    *,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder; measures prompts in tokens too.")
    ] = None,
    max_prompt_length: Annotated[
        int | None,
        typer.Option(min=1, help="Count rows with more tokens than this; needs --tokenizer."),
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 0,
    prompt_key: Annotated[str, typer.Option(help="Column with the messages.")] = "prompt",
    reward_fn_key: Annotated[
        str, typer.Option(help="Column that routes a row to its scorer.")
    ] = "data_source",
    image_key: Annotated[str, typer.Option(help="Column with images, if there is one.")] = "images",
    as_json: AsJson = False,
) -> None:
    """Summarize files: data sources with their scorers, lengths, duplicates, unusable rows.

    Images are read, and must respect the default limits of sluice.limits; the tokens of rows with
    images are not counted. No configuration is read: the template has its defaults.
    The exit code is 1 if a row cannot be used.

    \b
    Examples:
      sluice data inspect train.parquet --tokenizer models/Qwen3-8B --head 2
      sluice data inspect gsm8k.parquet math.parquet
    """
    if max_prompt_length is not None and tokenizer is None:
        raise ConfigError("--max-prompt-length counts tokens; give a model folder with --tokenizer")
    columns = PromptColumns(
        prompt_key, reward_fn_key, images=image_key, renamed_by=("--prompt-key", "--reward-fn-key")
    )
    paths = file_list([str(file) for file in files])
    opened = open_prompt_files(paths, columns, config_key="FILE")
    measure = None if tokenizer is None else token_counter(tokenizer)
    with show_count("reading", opened.num_rows) as advance:
        inspection = inspect_files(
            opened,
            measure_tokens=measure,
            check_row=partial(images_of_row, limits=DEFAULT_LIMITS),
            num_head=head,
            on_rows=advance,
        )
    names = list(dict.fromkeys(name for path in paths for name in check_raw_file(Path(path))))
    if as_json:
        print_json(inspection_as_json(paths, names, inspection, max_prompt_length))
    else:
        print_inspection(output_console(), paths, names, inspection, max_prompt_length)
    if inspection.num_bad:
        raise typer.Exit(1)


def token_counter(folder: Path) -> MeasureTokens:
    """Return a function that counts the tokens of messages as the rollout does by default.

    The count includes the generation prompt.

    Args:
        folder: a model or tokenizer directory.

    Raises:
        ConfigError: it holds no tokenizer, or one without a chat template, or transformers is not
            installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            "--tokenizer: transformers is not installed; pip install 'sluice[torch]'"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--tokenizer: {folder} holds no tokenizer ({error}); give a model directory"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(f"--tokenizer: {folder} has no chat template; give a chat model's")

    def count(messages: Sequence[ChatMessage]) -> int:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise DataError(f"the chat template refused the messages: {error}") from error
        return len(tokenizer(str(text), add_special_tokens=False)["input_ids"])

    return count


def print_inspection(
    console: Console,
    files: list[str],
    columns: list[str],
    inspection: Inspection,
    max_prompt_length: int | None = None,
) -> None:
    """Print all findings, problems last."""
    facts = [
        ("rows", str(inspection.num_rows)),
        ("columns", ", ".join(columns)),
        ("duplicates", _share(inspection.num_duplicates, inspection.num_rows)),
        *([("images", str(inspection.num_images))] if inspection.num_images else []),
        ("unusable rows", _share(inspection.num_bad, inspection.num_rows)),
    ]
    if max_prompt_length is not None:
        overlong = inspection.num_longer(max_prompt_length)
        name = f"over {max_prompt_length} tokens{_length_suffix(inspection)}"
        facts.append((name, _share(overlong, inspection.tokens.size)))
    print_table(console, printable(", ".join(files)), ("what", "value"), facts)
    print_table(
        console,
        "data sources",
        ("data source", "rows", "scorer"),
        _sources(inspection),
        right=("rows",),
    )
    if inspection.characters.size:
        _print_lengths(console, inspection)
    for number, row in enumerate(inspection.head):
        _print_row(console, number, row)
    _print_remedies(console, inspection)


def inspection_as_json(
    files: list[str],
    columns: list[str],
    inspection: Inspection,
    max_prompt_length: int | None = None,
) -> dict[str, object]:
    """Return all findings as one object; `num_overlong` is null without a limit."""
    overlong = None if max_prompt_length is None else inspection.num_longer(max_prompt_length)
    return {
        "files": files,
        "columns": columns,
        "num_rows": inspection.num_rows,
        "num_duplicates": inspection.num_duplicates,
        "num_images": inspection.num_images,
        "num_bad": inspection.num_bad,
        "num_overlong": overlong,
        "problems": inspection.problems,
        "data_sources": {
            source: {
                "rows": rows,
                "scorer": scorer_name(source),
                "unread_truths": inspection.unread_truths[source],
            }
            for source, rows in inspection.sources.items()
        },
        "characters": _named_quantiles(inspection.characters),
        "tokens": _named_quantiles(inspection.tokens),
    }


def print_prepared(console: Console, output: str, result: PrepareResult) -> None:
    """Print the numbers of rows written and left out."""
    left_out = [
        *([f"{result.num_duplicates} duplicates"] if result.num_duplicates else []),
        *([f"{result.num_bad} unusable rows"] if result.num_bad else []),
    ]
    tail = f", left out {' and '.join(left_out)}" if left_out else ""
    print_line(console, f"{output}: {result.num_written} rows of {result.num_read} read{tail}")
    for problem in result.problems:
        print_line(console, f"  {problem}")


def _sources(inspection: Inspection) -> list[tuple[str, str, str]]:
    return [
        (printable(source), str(rows), scorer_name(source) or NO_SCORER)
        for source, rows in inspection.sources.most_common()
    ]


def _length_suffix(inspection: Inspection) -> str:
    return " (rows without images)" if inspection.num_images else ""


def _print_lengths(console: Console, inspection: Inspection) -> None:
    rows = [("characters", *map(str, quantiles(inspection.characters)))]
    if inspection.tokens.size:
        rows.append(
            (f"tokens{_length_suffix(inspection)}", *map(str, quantiles(inspection.tokens)))
        )
    names = ("prompt length", *_QUANTILE_NAMES)
    print_table(console, "prompt lengths", names, rows, right=names[1:])


def _print_row(console: Console, number: int, row: PromptRow) -> None:
    console.print(Text(f"row {number}: {printable(row.data_source)}", style="bold"))
    for message in row.messages:
        text = message.content
        cut = text if len(text) <= _HEAD_CHARACTERS else f"{text[:_HEAD_CHARACTERS]}…"
        print_line(console, f"{message.role}: {cut}")
    print_line(console, f"ground truth: {row.ground_truth}\n")


def _print_remedies(console: Console, inspection: Inspection) -> None:
    for problem in inspection.problems:
        print_line(console, f"problem: {problem}")
    if inspection.num_bad > len(inspection.problems):
        print_line(console, f"and {inspection.num_bad - len(inspection.problems)} more")
    unknown = sorted(source for source in inspection.sources if scorer_name(source) is None)
    if unknown:
        print_line(
            console,
            f"note: no built-in scorer for {', '.join(unknown)}; name one with "
            "reward.scorer_routes, or set reward.custom_reward_function.path",
        )
    for source, num_rows in sorted(inspection.unread_truths.items()):
        print_line(
            console,
            f"note: {num_rows} rows of {source} have a list or a mapping as ground truth, which "
            f"its scorer {scorer_name(source)} refuses; write the answers as text, or set "
            "reward.custom_reward_function.path",
        )
    if inspection.num_duplicates:
        print_line(
            console,
            f"note: {inspection.num_duplicates} rows repeat earlier ones; 'sluice data prepare' "
            "leaves them out with --deduplicate",
        )


def _named_quantiles(lengths: Lengths) -> Mapping[str, int]:
    return dict(zip(_QUANTILE_NAMES, quantiles(lengths), strict=False))


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.1%})" if count else "0"
