"""Write the table of docs/engines.md, which engine kept which rule of the contract, by real runs.

.venv/bin/python -m pytest tests/unit/rollout/test_engine_contract_torch.py --junitxml torch.xml
make test-vllm ARGS="--junitxml vllm.xml"
make test-sglang ARGS="--junitxml sglang.xml"
.venv/bin/python tools/generate_engines_table.py torch=torch.xml vllm=vllm.xml sglang=sglang.xml
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines.md"
BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"
CLASSES = ("Contract", "Lifecycle")


def read_circumstances(report: ElementTree.Element) -> str:
    """Return day, commit and versions of a run, as far as its report has them."""
    suite = next(report.iter("testsuite"))
    reported = {one.get("name"): one.get("value", "") for one in suite.iter("property")}
    day = suite.get("timestamp", "").partition("T")[0]
    return ", ".join(filter(None, (day, reported.get("code"), reported.get("versions"))))


def read_rules(report: ElementTree.Element) -> Iterator[tuple[str, bool]]:
    """Yield each case of a rule of the contract in the order they ran, and whether it was kept."""
    for case in report.iter("testcase"):
        if case.get("classname", "").endswith(CLASSES):
            name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
            yield name, not any(child.tag in ("failure", "error", "skipped") for child in case)


def table(reports: Mapping[str, Sequence[ElementTree.Element]]) -> Iterator[str]:
    """Yield one line a rule, one column an engine; a number counts the cases that were run."""
    cases: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for engine, found in reports.items():
        for name, is_kept in (rule for report in found for rule in read_rules(report)):
            cases[name][engine].append(is_kept)
    if not cases:
        raise SystemExit("no rule of the engine contract in the reports; give those of its runs")
    yield f"| rule | {' | '.join(reports)} |"
    yield f"|---|{'---|' * len(reports)}"
    for name, of_engine in cases.items():
        yield f"| {name} | {' | '.join(_cell(of_engine[engine]) for engine in reports)} |"


def _cell(outcomes: Sequence[bool]) -> str:
    if not outcomes:
        return "not run"
    broken = outcomes.count(False)
    return f"kept ({len(outcomes)})" if not broken else f"**broken** ({broken} of {len(outcomes)})"


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python tools/generate_engines_table.py torch=torch.xml vllm=vllm.xml",
    )
    parser.add_argument("reports", nargs="+", metavar="ENGINE=REPORT", help="pytest's --junitxml")
    reports: dict[str, list[ElementTree.Element]] = defaultdict(list)
    for engine, _, path in (one.partition("=") for one in parser.parse_args(argv).reports):
        reports[engine].append(ElementTree.parse(path).getroot())  # noqa: S314 written by pytest
    runs = [
        f"* {engine}: {'; '.join(map(read_circumstances, found))}"
        for engine, found in reports.items()
    ]
    content = "\n".join((*table(reports), "", "Run with:", "", *runs))
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: put {BEGIN} and {END} where the table goes")
    PAGE.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
