"""`sluice reward`: try a reward function on rows of a data set, without a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sluice.cli.arguments import AsJsonLines, complete_setting
from sluice.cli.terminal import print_json
from sluice.config.loading.loader import load_config
from sluice.config.loading.override_values import format_override_value
from sluice.config.run import RunConfig
from sluice.config.sources import TRAIN_KEY, VAL_KEY, prompt_files
from sluice.data.prompt_rows import PromptRow
from sluice.data.row_files import read_rows
from sluice.doctor.finding import ROWS_LOOKED_AT, open_first_rows
from sluice.doctor.reward import made_up_response, try_responses
from sluice.doctor.trial import TrialAnswer
from sluice.errors import ConfigError, DataError
from sluice.safe_text import printable

_SHOWN_CHARACTERS = 160
_CALL_S = 10.0  # beside the limit of a call: the start of the next process
_NEEDS = (
    "response, a text; data_source, ground_truth and extra_info are those of the row of the same "
    "number in --data where they are left out"
)

reward_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Try a reward function without a run.\n\n"
    "\b\nExample:\n  sluice reward try my_reward.py --data train.parquet -n 20",
)


class _Response(msgspec.Struct):
    response: str
    data_source: str | None = None
    ground_truth: str | None = None
    extra_info: dict[str, Any] | None = None


@reward_commands.callback()
def _reward() -> None:
    """Keep the name of the only command."""


@reward_commands.command("try")
def try_function(
    function: Annotated[
        str, typer.Argument(metavar="FUNCTION", help="File of the function, or a run's YAML file.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Keys to override, such as reward.custom_reward_function.name=grade.",
            show_default=False,
            autocompletion=complete_setting,
        ),
    ] = None,
    *,
    data: Annotated[
        Path | None, typer.Option(help="Rows in verl's format; none: data.train_files.")
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, max=ROWS_LOOKED_AT, help="Rows.")] = 8,
    with_truth: Annotated[
        bool, typer.Option("--with-truth", help="Grade each row's bare ground truth.")
    ] = False,
    responses: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Grade these: JSON lines or parquet with response."),
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Grade responses to the first rows as a run would: in a process with its limits.

    FUNCTION may be a run's YAML file: then its function grades, or its reward model over HTTP.

    Without --with-truth and --responses, the responses are made up: they end with the ground truth
    in the usual forms. Prints for each row the score, or the failure with the last frames of the
    function, and what the function printed on stderr. The score is the reward without the overlong
    penalty. The exit code is 1 if a response has no score.

    \b
    Examples:
      sluice reward try my_reward.py --data train.parquet -n 20
      sluice reward try run.yaml reward.scorer_pool.timeout_s=30 --with-truth
      sluice reward try my_reward.py --responses responses.jsonl --json
    """
    if with_truth and responses is not None:
        raise ConfigError("--with-truth and --responses both name the responses; leave one out")
    config = _load_function_config(function, settings or [], data)
    pairs = _rows_with_responses(config, count, responses, with_truth=with_truth)
    enough_s = len(pairs) * (config.reward.scorer_pool.timeout_s + _CALL_S)
    answers, printed = try_responses(config, pairs, enough_s)
    if printed:
        typer.echo(printable(printed), err=True)
    for number, ((row, response), answer) in enumerate(zip(pairs, answers, strict=False)):
        if as_json:
            print_json({"row": row.place, "response": response, **msgspec.to_builtins(answer)})
        else:
            typer.echo(printable(_response_text(number, row, response, answer)))
    scores = [trial.score for trial in answers if trial.score is not None]
    typer.echo(_verdict(scores, len(pairs)), err=True)
    if len(scores) < len(pairs):
        raise typer.Exit(1)


def _load_function_config(function: str, settings: Sequence[str], data: Path | None) -> RunConfig:
    is_run = Path(function).suffix in {".yaml", ".yml"}
    overrides = (
        [] if is_run else [f"reward.custom_reward_function.path={format_override_value(function)}"]
    )
    if data is not None:
        overrides.append(f"{TRAIN_KEY}={format_override_value(str(data))}")
    return load_config(Path(function) if is_run else None, [*overrides, *settings])


def _rows_with_responses(
    config: RunConfig, count: int, responses: Path | None, *, with_truth: bool
) -> list[tuple[PromptRow, str]]:
    """Return rows, each with the response to grade."""
    keys = {key: files for key, files in prompt_files(config).items() if key != VAL_KEY}
    of_keys = [open_first_rows(config, key)[1] for key, files in keys.items() if files]
    turns = chain.from_iterable(zip_longest(*of_keys))
    rows = [row for row in turns if row is not None][:count]
    if responses is not None:
        return list(_read_responses(responses, rows, count))
    if not rows:
        raise ConfigError(f"{next(iter(keys))} is null: there is no row to try; give --data FILE")
    return [(row, row.ground_truth if with_truth else made_up_response(row)) for row in rows]


def _read_responses(
    file: Path, rows: Sequence[PromptRow], count: int
) -> Iterator[tuple[PromptRow, str]]:
    """Yield the responses of a file, each with its own row or with the one of its number."""
    for number, (place, entry) in enumerate(read_rows(file, _Response, _NEEDS)[:count]):
        row = rows[number] if number < len(rows) else None
        source, truth = entry.data_source, entry.ground_truth
        if row is None and (source is None or truth is None):
            raise DataError(
                f"{file}, {place}: no data_source or ground_truth, and no row {number} in --data; "
                f"it needs {_NEEDS}"
            )
        extra_info = (
            entry.extra_info if entry.extra_info is not None or row is None else row.extra_info
        )
        yield (
            PromptRow(
                row.messages if row else (),
                (row.data_source if row else "") if source is None else source,
                (row.ground_truth if row else "") if truth is None else truth,
                extra_info or {},
                f"{file}, {place}",
                truth_is_json=row is not None and truth is None and row.truth_is_json,
            ),
            entry.response,
        )


def _response_text(number: int, row: PromptRow, response: str, answer: TrialAnswer) -> str:
    """Return the lines of one response."""
    if answer.score is None:
        outcome = f"failed: {answer.failure}"
    else:
        parts = [f"score {answer.score:g}"]
        parts += [f"{name}={value:g}" for name, value in sorted(answer.metrics.items())]
        parts += [] if answer.prediction is None else [f"pred={answer.prediction!r}"]
        outcome = " ".join(parts)
    response_end = (
        response if len(response) <= _SHOWN_CHARACTERS else f"…{response[-_SHOWN_CHARACTERS:]}"
    )
    lines = [f"[{number}] {row.place}: {outcome}", f"response {response_end!r}", *answer.frames]
    return "\n    ".join(lines)


def _verdict(scores: Sequence[float], total: int) -> str:
    text = f"{len(scores)} of {total} scored"
    if not scores:
        return text
    return f"{text}, mean {sum(scores) / len(scores):.4g}, {min(scores):g} to {max(scores):g}"
