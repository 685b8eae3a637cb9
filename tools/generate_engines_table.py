"""Write the table of docs/engines.md, which engine kept which rule of the contract, by real runs.

.venv/bin/python -m pytest tests/unit/rollout/test_engine_contract_torch.py --junitxml torch.xml
make test-vllm ARGS="--junitxml vllm.xml"
make test-sglang ARGS="--junitxml sglang.xml"
.venv/bin/python tools/generate_engines_table.py torch=torch.xml vllm=vllm.xml sglang=sglang.xml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"
CLASSES = ("Contract", "Lifecycle")
Rules = dict[str, list[bool]]


def read_circumstances(path: Path) -> str:
    """Day, commit and versions of a report's run, as far as it tells them."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))  # noqa: S314 written by pytest
    reported = {one.get("name"): one.get("value", "") for one in suite.iter("property")}
    day = suite.get("timestamp", "").partition("T")[0]
    return ", ".join(filter(None, (day, reported.get("code"), reported.get("versions"))))


def read_report(path: Path) -> Rules:
    """Outcomes of every rule of the contract in a pytest report, in the order they ran.

    Raises:
        SystemExit: the report holds no rule of the contract.
    """
    rules: Rules = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):  # noqa: S314 written by pytest
        if not case.get("classname", "").endswith(CLASSES):
            continue
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        kept = not any(child.tag in ("failure", "error", "skipped") for child in case)
        rules.setdefault(name, []).append(kept)
    if not rules:
        raise SystemExit(
            f"{path}: no rule of the engine contract in it; give the report of its run"
        )
    return rules


def table(reports: Mapping[str, Rules]) -> str:
    """One row a rule, one column an engine; a number counts the cases that were run."""
    names = dict.fromkeys(name for rules in reports.values() for name in rules)
    lines = [
        f"| rule | {' | '.join(reports)} |",
        f"|---|{'---|' * len(reports)}",
    ]
    lines += [
        f"| {name} | {' | '.join(_cell(rules.get(name, [])) for rules in reports.values())} |"
        for name in names
    ]
    return "\n".join(lines)


def _cell(outcomes: Sequence[bool]) -> str:
    if not outcomes:
        return "not run"
    broken = outcomes.count(False)
    return f"kept ({len(outcomes)})" if not broken else f"**broken** ({broken} of {len(outcomes)})"


def replace_table(page: str, content: str) -> str:
    """The page with `content` between its marks.

    Raises:
        SystemExit: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.relative_to(ROOT)}: put {BEGIN} and {END} where the table goes")
    return f"{before}{begin}\n{content}\n{end}{after}"


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python tools/generate_engines_table.py torch=torch.xml vllm=vllm.xml",
    )
    parser.add_argument(
        "reports", nargs="+", metavar="ENGINE=REPORT", help="of pytest's --junitxml"
    )
    given = [one.partition("=") for one in parser.parse_args(argv).reports]
    reports: dict[str, Rules] = {}
    circumstances: dict[str, list[str]] = {}
    for engine, _, path in given:
        circumstances.setdefault(engine, []).append(read_circumstances(Path(path)))
        rules = reports.setdefault(engine, {})
        for name, outcomes in read_report(Path(path)).items():
            rules.setdefault(name, []).extend(outcomes)
    page = PAGE.read_text(encoding="utf-8")
    reported = [f"* {engine}: {'; '.join(each)}" for engine, each in circumstances.items()]
    content = "\n".join((table(reports), "", "Run with:", "", *reported))
    PAGE.write_text(replace_table(page, content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
