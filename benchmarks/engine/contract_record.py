"""The record of the engine contract in docs/engines.md, which real runs wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BEGIN, _END = "<!-- rules: begin -->", "<!-- rules: end -->"
_KEPT = re.compile(r"kept \((\d+)\)")
_BROKEN = re.compile(r"\*\*broken\*\* \((\d+) of (\d+)\)")


def contract_record(page: str, engines: Sequence[str]) -> dict[str, str]:
    """Return ``passed/total`` cases of the contract for each engine, or why there are none.

    Args:
        page: the text of docs/engines.md.
        engines: by their names in the table's head.

    Raises:
        ValueError: the page has no such table.
    """
    _, begin, rest = page.partition(_BEGIN)
    rows = [_cells(line) for line in rest.partition(_END)[0].splitlines() if line.startswith("|")]
    if not begin or not rows:
        raise ValueError(f"docs/engines.md: no table after {_BEGIN}")
    head, lines = rows[0], rows[2:]
    return {
        name: _summary([line[head.index(name)] for line in lines])
        if name in head
        else "not run: docs/engines.md has no column for it"
        for name in engines
    }


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _summary(cells: Sequence[str]) -> str:
    passed = total = 0
    for cell in cells:
        if kept := _KEPT.search(cell):
            passed, total = passed + int(kept[1]), total + int(kept[1])
        elif broken := _BROKEN.search(cell):
            passed += int(broken[2]) - int(broken[1])
            total += int(broken[2])
    return f"{passed}/{total}" if total else "not run: the recorded run has no case of it"
