"""Check the chart of deploy/helm/sluice without a cluster; `make helm-test`.

Each set of values is linted and rendered. The objects must be valid for Kubernetes, strictly, and
equal to the golden render in deploy/helm/golden: `defaults.yaml`, and for another set of values
what it changes there. `make helm-test ARGS=--update` writes the goldens: read their diff before you
commit it.

The last line printed is one JSON object: `passed`, `phases` (seconds by name), `documents`
(rendered in all), `value_sets` (their names) and more. Exit code 0: all is as it has to be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python import HelmError
from helm_python.chart import Chart, lint

from tools.phases import Phases, conclude

_DATA = Path(__file__).parent
CHART = _DATA.parents[1] / "deploy" / "helm" / "sluice"
GOLDEN, EXAMPLES = CHART.parent / "golden", CHART.parent / "examples"
RELEASE, NAMESPACE = "sluice", "training"
# The oldest Kubernetes that the chart is for, and the newest that the package knows.
VERSIONS = ("1.27", str(kubernetes_validate.latest_version()))
# The package holds no schemas of extensions.
_EXTENSIONS = ("monitoring.coreos.com/",)
_DIFF_LINES = 20
DEFAULTS = "defaults"

Document = dict[str, Any]
Values = dict[str, Any]


def value_sets() -> dict[str, Values]:
    """Return the chart's own values, the examples' and the corners', by name."""
    files = (*sorted(EXAMPLES.glob("*.yaml")), *sorted(_DATA.glob("corners/*.yaml")))
    return {DEFAULTS: {}, **{file.stem: _read(file) for file in files}}


def _read(file: Path) -> Any:  # noqa: ANN401 - YAML
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def lint_problems(values: Values) -> list[str]:
    """Return what Helm's linter finds, warnings included."""
    report = lint(CHART, values, strict=True, namespace=NAMESPACE)
    found = [str(each) for each in report["errors"]]
    # Severity 1 is advice: that a chart should have an icon.
    return found + [f"{m['path']}: {m['error']}" for m in report["messages"] if m["severity"] > 1]


def render(values: Values, revision: int = 1) -> tuple[list[Document], str]:
    """Return all objects, in the order of their files, and the notes.

    Args:
        values: above the chart's own.
        revision: 1 at the installation, more after each upgrade.

    Raises:
        HelmError: the schema or a template refuses the values.
    """
    with Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(
            values,
            name=RELEASE,
            namespace=NAMESPACE,
            revision=revision,
            is_install=revision == 1,
            is_upgrade=revision > 1,
        )
    files = sorted(name for name in texts if name.endswith((".yaml", ".yml")))
    notes = next(text for name, text in texts.items() if name.endswith("NOTES.txt"))
    loaded = [each for name in files for each in yaml.safe_load_all(texts[name])]
    return [each for each in loaded if each is not None], notes


def schema_problems(documents: Iterable[Document], version: str) -> Iterator[str]:
    """Yield what a version of Kubernetes would refuse: an unknown field, a wrong type."""
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}, Kubernetes {version}"
        if "namespace" in document["metadata"]:
            yield f"{name}: names its namespace, which Helm gives"
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name}: {'.'.join(map(str, error.path))}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            if not str(document["apiVersion"]).startswith(_EXTENSIONS):
                yield f"{name}: {error}"


def golden_text(documents: Iterable[Document]) -> str:
    """Return the objects as YAML; files of the chart that they hold stand there by name."""
    programs = {
        file.read_text(encoding="utf-8").strip(): f"<{file.relative_to(CHART).as_posix()}>"
        for file in sorted((CHART / "files").rglob("*"))
        if file.is_file() and file.suffix != ".pyc"
    }

    def shortened(value: object) -> object:
        if isinstance(value, dict):
            return {key: shortened(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shortened(inner) for inner in value]
        return programs.get(value.strip(), value) if isinstance(value, str) else value

    return yaml.safe_dump_all(map(shortened, documents), sort_keys=False, width=100)


def goldens(rendered: Mapping[str, list[Document]]) -> dict[str, str]:
    """Return the golden files' texts by name: all objects of the defaults, then differences.

    Differences carry no line numbers, so a change of the defaults alters one file.
    """
    texts = {name: golden_text(documents).splitlines() for name, documents in rendered.items()}
    defaults = texts.pop(DEFAULTS)
    files = {f"{DEFAULTS}.yaml": "\n".join((*defaults, ""))}
    for name, lines in texts.items():
        diff = unified_diff(defaults, lines, DEFAULTS, name, n=3, lineterm="")
        changes = ("@@" if line.startswith("@@") else line.rstrip() for line in diff)
        files[f"{name}.diff"] = "\n".join((*changes, ""))
    return files


def golden_problems(texts: Mapping[str, str], *, updates: bool) -> Iterator[str]:
    """Yield the first lines that differ from each golden file; with `updates`, write them."""
    known = {file.name: file.read_text(encoding="utf-8") for file in GOLDEN.glob("*.*")}
    if updates:
        GOLDEN.mkdir(exist_ok=True)
        for name in known.keys() - texts.keys():
            (GOLDEN / name).unlink()
        for name, text in texts.items():
            (GOLDEN / name).write_text(text, encoding="utf-8")
        return
    for name in sorted(known.keys() | texts.keys()):
        wanted, found = known.get(name, ""), texts.get(name, "")
        diff = unified_diff(wanted.splitlines(), found.splitlines(), "golden", "rendered", n=1)
        if wanted != found:
            lines = islice((line.rstrip() for line in diff), _DIFF_LINES)
            yield "\n".join((f"{name} differs (ARGS=--update writes it):", *lines))


def refusal_problems(refused: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield wrong values that Helm takes, or refuses without naming the field."""
    for case in refused:
        field, values = case["field"], case["values"]
        try:
            render(values)
        except HelmError as error:
            if field not in str(error):
                yield f"{values}: refused without the name {field}: {error}"
        else:
            yield f"{values}: taken"


def upgrade_problems(upgrades: Mapping[str, Iterable[Values]]) -> Iterator[str]:
    """Yield upgrades that replace the trainer's Job needlessly, or change it in place."""

    def job(values: Values, component: str, revision: int = 2) -> tuple[str, object]:
        documents, _ = render({"metrics": {"enabled": True}, **values}, revision)
        label = "app.kubernetes.io/component"
        jobs = [one for one in documents if one["kind"] == "Job"]
        (found,) = [one for one in jobs if one["metadata"]["labels"][label] == component]
        return found["metadata"]["name"], found["spec"]["template"]

    before = job({}, "trainer", revision=1)
    for values in upgrades["keep-trainer"]:
        if job(values, "trainer") != before:
            yield f"{values}: replaces the trainer"
    for values in upgrades["replace-trainer"]:
        if job(values, "trainer")[0] == before[0]:
            yield f"{values}: changes the pod of a Job that is there"
    # An upgrade of an ended run starts its replicas again, so another Job must end it.
    if job({}, "end-of-run")[0] == job({}, "end-of-run", revision=1)[0]:
        yield "after an upgrade no Job ends the run"


def set_problems(values: Values, documents: list[Document]) -> Iterator[str]:
    """Render one set of values into `documents`; yield what is wrong."""
    try:
        yield from lint_problems(values)
        rendered, notes = render(values)
    except HelmError as error:
        yield str(error)
        return
    documents += rendered
    if "<no value>" in notes or RELEASE not in notes:
        yield f"notes: {notes}"
    for version in VERSIONS:
        yield from schema_problems(documents, version)


def main() -> int:
    """Run the test; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the golden renders")
    arguments = parser.parse_args()
    sets, refused, phases = value_sets(), _read(_DATA / "refused.yaml"), Phases()
    problems: list[str] = []
    rendered: dict[str, list[Document]] = {name: [] for name in sets}
    for name, values in sets.items():
        with phases.phase(name):
            found = set_problems(values, rendered[name])
            problems += (f"{name}: {each}" for each in found)
    with phases.phase("goldens"):
        problems += golden_problems(goldens(rendered), updates=arguments.update)
    with phases.phase("refusals"):
        problems += refusal_problems(refused)
    with phases.phase("upgrades"):
        problems += upgrade_problems(_read(_DATA / "upgrades.yaml"))
    report = {
        "phases": phases.seconds,
        "documents": sum(map(len, rendered.values())),
        "value_sets": list(sets),
        "kubernetes": list(VERSIONS),
        "refusals": len(refused),
    }
    return conclude(report, problems)


if __name__ == "__main__":
    sys.exit(main())
