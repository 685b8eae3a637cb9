"""Blocks of docs/parallelism.md that a benchmark writes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reporting import ROOT

PAGE = ROOT / "docs" / "parallelism.md"
IMAGES = ROOT / "docs" / "images"


def replace_block(name: str, lines: Sequence[str]) -> None:
    """Replace what is between the page's marks of a block."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    block = "\n".join(lines)
    PAGE.write_text(f"{before}{begin}\n{block}\n{end}{after}", encoding="utf-8")
