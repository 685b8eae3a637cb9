"""What `sluice data` prints: tables of sources and lengths, a histogram, problems."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from sluice.cli.plain_table import print_table
from sluice.cli.terminal_text import printable
from sluice.data.inspection import QUANTILES, Inspection, Lengths, histogram, quantiles
from sluice.data.known_sources import scorer_name
from sluice.data.prepare import Prepared
from sluice.data.prompt_rows import PromptRow

BAR_COLUMNS = 40
NO_SCORER = "none"
_HEAD_CHARACTERS = 400
_QUANTILE_NAMES = tuple(
    {0.0: "least", 0.5: "median", 1.0: "most"}.get(q, f"{q:.0%}") for q in QUANTILES
)


def print_inspection(console: Console, file: str, columns: str, found: Inspection) -> None:
    """Prints all findings, problems last."""
    facts = [
        ("rows", str(found.num_rows)),
        ("columns", columns),
        ("duplicates", _share(found.num_duplicates, found.num_rows)),
        *([("images", str(found.num_images))] if found.num_images else []),
        ("unusable rows", _share(found.num_bad, found.num_rows)),
    ]
    print_table(console, printable(file), ("what", "value"), facts)
    print_table(
        console, "data sources", ("data source", "rows", "scorer"), _sources(found), right=("rows",)
    )
    if found.characters.size:
        _print_lengths(console, found)
    for number, row in enumerate(found.head):
        _print_row(console, number, row)
    _print_remedies(console, found)


def inspection_as_json(file: str, columns: list[str], found: Inspection) -> dict[str, object]:
    """The same as one object."""
    return {
        "file": file,
        "columns": columns,
        "num_rows": found.num_rows,
        "num_duplicates": found.num_duplicates,
        "num_images": found.num_images,
        "num_bad": found.num_bad,
        "problems": found.problems,
        "data_sources": {
            source: {"rows": rows, "scorer": scorer_name(source)}
            for source, rows in found.sources.items()
        },
        "characters": _named_quantiles(found.characters),
        "tokens": _named_quantiles(found.tokens),
    }


def print_prepared(console: Console, output: str, made: Prepared) -> None:
    """One line of what was written, and what was left out."""
    left_out = [
        *([f"{made.num_duplicates} duplicates"] if made.num_duplicates else []),
        *([f"{made.num_bad} unusable rows"] if made.num_bad else []),
    ]
    tail = f", left out {' and '.join(left_out)}" if left_out else ""
    line = f"{output}: {made.num_written} rows of {made.num_read} read{tail}"
    console.print(printable(line), soft_wrap=True, markup=False)
    for problem in made.problems:
        console.print(printable(f"  {problem}"), soft_wrap=True, markup=False)


def _sources(found: Inspection) -> list[tuple[str, str, str]]:
    return [
        (printable(source), str(rows), scorer_name(source) or NO_SCORER)
        for source, rows in found.sources.most_common()
    ]


def _print_lengths(console: Console, found: Inspection) -> None:
    rows = [("characters", *map(str, quantiles(found.characters)))]
    if found.tokens.size:
        rows.append(("tokens", *map(str, quantiles(found.tokens))))
    names = ("prompt length", *_QUANTILE_NAMES)
    print_table(console, "prompt lengths", names, rows, right=names[1:])
    unit, lengths = ("tokens", found.tokens) if found.tokens.size else _by_characters(found)
    bins = histogram(lengths)
    highest = max(one.count for one in bins)
    bars = [
        (f"{b.low} to {b.high}", str(b.count), "█" * -(-b.count * BAR_COLUMNS // highest))
        for b in bins
    ]
    print_table(console, f"prompts by {unit}", (unit, "rows", ""), bars, right=(unit, "rows"))


def _by_characters(found: Inspection) -> tuple[str, Lengths]:
    """What the histogram shows without a tokenizer."""
    return "characters", found.characters


def _print_row(console: Console, number: int, row: PromptRow) -> None:
    console.print(Text(f"row {number}: {printable(row.data_source)}", style="bold"))
    for message in row.messages:
        text = message.content
        cut = text if len(text) <= _HEAD_CHARACTERS else f"{text[:_HEAD_CHARACTERS]}…"
        console.print(
            Text(printable(f"{message.role}: {cut}")), soft_wrap=True, markup=False, highlight=False
        )
    console.print(Text(printable(f"ground truth: {row.ground_truth}\n")), soft_wrap=True)


def _print_remedies(console: Console, found: Inspection) -> None:
    for problem in found.problems:
        console.print(Text(printable(f"problem: {problem}")), soft_wrap=True)
    if found.num_bad > len(found.problems):
        console.print(Text(f"and {found.num_bad - len(found.problems)} more"))
    unknown = sorted(source for source in found.sources if scorer_name(source) is None)
    if unknown:
        names = printable(", ".join(unknown))
        console.print(
            Text(
                f"note: no built-in scorer for {names}; name one with reward.scorer_routes, or set "
                "reward.custom_reward_function.path"
            ),
            soft_wrap=True,
        )
    if found.num_duplicates:
        console.print(
            Text(
                f"note: {found.num_duplicates} rows repeat earlier ones; 'sluice data prepare' "
                "leaves them out with --deduplicate"
            ),
            soft_wrap=True,
        )


def _named_quantiles(lengths: Lengths) -> Mapping[str, int]:
    return dict(zip(_QUANTILE_NAMES, quantiles(lengths), strict=False))


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.1%})" if count else "0"
