"""Keys, their coverage and their differences, as tables and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import yaml
from rich.console import Console
from rich.text import Text

from sluice.cli.plain_table import print_table
from sluice.config.catalogue.entry import ABSENT, Status
from sluice.config.coverage import Coverage
from sluice.config.diff import Difference
from sluice.config.explain import KeyDescription, explain_key


def print_keys(console: Console, keys: Sequence[KeyDescription]) -> None:
    """All keys, one a line."""
    print_table(
        console,
        f"{len(keys)} keys",
        ("key", "status", "default", "meaning"),
        ((one.path, str(one.status), shown(one.default), one.meaning) for one in keys),
    )


def print_description(console: Console, key: KeyDescription) -> None:
    """One key with everything known about it; empty lines are left out."""
    facts = [
        ("status", f"{key.status}{f': {key.instead}' if key.instead else ''}"),
        ("meaning", key.meaning),
        ("takes", f"{key.takes}{f', in {key.unit}' if key.unit else ''}"),
        ("default", "any keys may stand below" if key.is_block else shown(key.default)),
        ("verl's default", key.verl_default or ""),
        ("effect", key.effect),
        ("advice", key.advice),
        ("sets", ", ".join(key.targets)),
        ("also spelled", ", ".join(key.spellings)),
    ]
    console.print(Text(key.path, style="bold"), soft_wrap=True)
    if key.asked != key.path:
        console.print(Text(f"  asked for as {key.asked}"), soft_wrap=True)
    for name, value in facts:
        if value:
            console.print(Text(f"  {name}: ", style="dim") + Text(value), soft_wrap=True)


def print_coverage(console: Console, found: Coverage) -> None:
    """What is not simply honoured, key by key and with the reason; then the sums."""
    rest = {
        key: status
        for file in found.files
        for key, status in file.keys.items()
        if status is not Status.HONOURED
    }
    if rest:
        print_table(
            console,
            "Keys that are not simply honoured",
            ("key", "status", "what happens"),
            ((key, str(status), _happens(key, status)) for key, status in rest.items()),
        )
    for file in found.files:
        for sentence in file.unknown:
            console.print(Text(f"{file.file}: {sentence}", style="red"), soft_wrap=True)
    rows = [
        (str(file.file), *_counts(Counter(file.keys.values())), str(len(file.unknown)))
        for file in found.files
    ]
    totals = ("all, each key once", *_counts(found.counts), str(found.num_unknown))
    columns = (*map(str, Status), "unknown")
    print_table(
        console, "Keys by what becomes of them", ("file", *columns), [*rows, totals], right=columns
    )


def _counts(found: Mapping[Status, int]) -> list[str]:
    return [str(found.get(status, 0)) for status in Status]


def _happens(key: str, status: Status) -> str:
    """The row's own words; of a key that is honoured otherwise, where it goes or why not."""
    described = explain_key(key)
    if status is Status.NOT_APPLICABLE and described.status is not status:
        return "this value asks for what happens anyway"
    if described.instead:
        return described.instead
    if status is Status.MAPPED:
        return f"is read as {described.path}"
    return described.advice or described.meaning


def print_differences(
    console: Console, differences: Sequence[Difference], names: tuple[str, str]
) -> None:
    """Keys with other values; columns are headed by the files."""
    if not differences:
        console.print("No difference.")
        return
    print_table(
        console,
        "1 difference" if len(differences) == 1 else f"{len(differences)} differences",
        ("key", *names, "default"),
        ((one.path, shown(one.left), shown(one.right), shown(one.default)) for one in differences),
    )


def description_as_json(key: KeyDescription) -> dict[str, object]:
    """One key; a default that does not exist is left out."""
    return _without_absent(asdict(key))


def coverage_as_json(found: Coverage) -> dict[str, object]:
    """Statuses by file and key, and the sums."""
    return {
        "files": [
            {
                "file": str(file.file),
                "keys": {key: str(status) for key, status in file.keys.items()},
                "unknown": list(file.unknown),
            }
            for file in found.files
        ],
        "counts": {str(status): count for status, count in found.counts.items()},
        "num_unknown": found.num_unknown,
    }


def difference_as_json(one: Difference) -> dict[str, object]:
    """One difference; a side on which the key is missing is left out."""
    values = {"path": one.path, "left": one.left, "right": one.right, "default": one.default}
    return _without_absent(values)


def shown(value: object) -> str:
    """A value as a YAML file has it, on one line; a dash where there is none."""
    if value is ABSENT:
        return "-"
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _without_absent(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not ABSENT}
