"""`make helm-test`: the chart of deploy/helm/sluice, without a cluster.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `documents`
(rendered in all), `value_sets` (their names) and more. Exit code 0: all is as it has to be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.compose_test.phases import Phases, say
from tools.helm_test.breaks import BREAKS, RULES, unseen_breaks
from tools.helm_test.chart import RefusedError, lint_problems, render
from tools.helm_test.documents import Rendered
from tools.helm_test.refusals import count as refusals_tried
from tools.helm_test.refusals import refusal_problems
from tools.helm_test.schema_check import schema_problems, versions
from tools.helm_test.upgrade_check import upgrade_problems
from tools.helm_test.value_sets import merged, value_sets

RELEASE = "sluice"


def main() -> int:
    """Runs the test."""
    sets, phases, problems = value_sets(), Phases(), list[str]()
    with phases.phase("lint"):
        for name, values in sets.items():
            problems += _of(name, lint_problems(values))
    with phases.phase("render"):
        rendered = {name: _render(name, values, problems) for name, values in sets.items()}
    if problems:
        return _report(phases, problems, {})
    with phases.phase("schemas"):
        for name, each in rendered.items():
            for version in versions():
                problems += _of(name, schema_problems(each.documents, version))
    with phases.phase("rules"):
        for name, each in rendered.items():
            for rule in RULES:
                problems += _of(f"{name}, {rule.__name__}", rule(each))
    with phases.phase("refusals"):
        problems += _of("refusals", refusal_problems())
    with phases.phase("upgrades"):
        problems += _of(
            "upgrade", upgrade_problems(lambda v, n: _render("upgrade", v, problems, n))
        )
    with phases.phase("rules fail"):
        problems += _of("faults", unseen_breaks(rendered))
    facts = {
        "documents": sum(len(each.documents) for each in rendered.values()),
        "value_sets": list(sets),
        "kubernetes": list(versions()),
        "rules": len(RULES),
        "faults_seen": len(BREAKS),
        "refusals": refusals_tried(),
    }
    return _report(phases, problems, facts)


def _report(phases: Phases, problems: list[str], facts: dict[str, object]) -> int:
    for problem in problems:
        say(f"FAILED: {problem}")
    last = {"passed": not problems, "phases": phases.seconds, **facts, "problems": len(problems)}
    sys.stdout.write(json.dumps(last) + "\n")
    return 1 if problems else 0


def _render(
    name: str, values: dict[str, object], problems: list[str], revision: int = 1
) -> Rendered:
    every = merged(values)
    try:
        documents, notes = render(values, RELEASE, revision)
    except RefusedError as error:
        problems.append(f"{name}: {error}")
        return Rendered(name, RELEASE, every, [])
    if "<no value>" in notes or RELEASE not in notes:
        problems.append(f"{name}: notes: {notes}")
    problems += [
        f"{name}: {document['kind']} names its namespace, which Helm gives"
        for document in documents
        if "namespace" in document["metadata"]
    ]
    return Rendered(name, RELEASE, every, documents)


def _of(where: str, found: Iterable[str]) -> list[str]:
    return [f"{where}: {each}" for each in found]


if __name__ == "__main__":
    sys.exit(main())
