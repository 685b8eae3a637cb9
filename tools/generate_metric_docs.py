"""Write the tables of docs/metrics.md and docs/prometheus.md from the table of metrics.

`python -m tools.generate_metric_docs` writes them; run it after every change of the table.
`python -m tools.generate_metric_docs --check` writes nothing and fails if a page is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sluice.telemetry.metric_names import Instrument, instruments, metrics
from tools.generated_pages import write_or_check

DOCS = Path(__file__).resolve().parent.parent / "docs"
_RUN_HEAD = "| name | definition | unit | emitted |\n|---|---|---|---|\n"
_PROMETHEUS_HEAD = "| name | kind | unit | labels | meaning |\n|---|---|---|---|---|\n"
_HEADINGS = {
    "every process": "Every process",
    "trainer": "Trainer",
    "reward": "Reward service",
    "rollout": "Replicas",
}


def _run_tables() -> Iterator[tuple[str, str]]:
    for title, rows in metrics().items():
        lines, above = [_RUN_HEAD], ""
        for one in rows:
            emitted = f"no: {one.absent}" if one.absent else one.emitted
            shown = "as above" if emitted == above != "every step" else emitted
            lines.append(_row((f"`{one.name}`", one.meaning, one.unit, shown)))
            above = emitted
        yield title, "".join(lines)


def _prometheus_tables() -> Iterator[tuple[str, str]]:
    for process, rows in instruments().items():
        yield _HEADINGS[process], _PROMETHEUS_HEAD + "".join(_row(_cells(one)) for one in rows)


def _cells(one: Instrument) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in one.labels) or "–"
    return f"`{one.name}`", one.kind, one.unit, labels, one.meaning


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def with_tables(page: str, tables: Iterable[tuple[str, str]]) -> str:
    """Return `page` with new tables below these headings.

    A heading's table is the first one below it with a column `name`.

    Raises:
        SystemExit: there is no such heading, or no table below it.
    """
    for heading, table in tables:
        before, mark, section = page.partition(f"\n## {heading}\n")
        above, found, rest = section.partition("\n| name |")
        if not mark or not found or "\n## " in above:
            raise SystemExit(f"docs: below '## {heading}' no table with the column name")
        rows = f"| name |{rest}".splitlines(keepends=True)
        num_rows = next((i for i, row in enumerate(rows) if not row.startswith("|")), len(rows))
        page = f"{before}{mark}{above}\n{table}{''.join(rows[num_rows:])}"
    return page


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; return 1 if the check failed."""
    pages = {DOCS / "metrics.md": _run_tables(), DOCS / "prometheus.md": _prometheus_tables()}
    files = {
        file: with_tables(file.read_text(encoding="utf-8"), tables)
        for file, tables in pages.items()
    }
    return write_or_check(files, arguments, "tools.generate_metric_docs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
