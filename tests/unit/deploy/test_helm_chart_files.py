"""Files of the Helm chart that need no Helm: what is generated, values with schema and examples."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from sluice.cli.main import commands as application
from sluice.cli.run.certificates import certs
from sluice.launch.network_layout import COMPUTE_IMAGE, KINDS, REWARD_IMAGE, SERVICE_PORTS
from sluice.telemetry.instruments.reward import DEMAND_REPLICAS
from tests.support.source_tree import name_of
from tools import generate_helm_values
from tools.helm_test.documented_commands import PAGE, documented_values, typed, values_of
from tools.helm_test.settings_rules import PREPARE_OPTIONS
from tools.helm_test.value_sets import CHART, EXAMPLES

ROOT = CHART.parents[2]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEMPLATES = sorted((CHART / "templates").iterdir())
# Read by charts that this one is part of, never by this one.
OF_HELM = {"global"}
TYPES = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "array": list,
    "object": dict,
    "null": type(None),
}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The definition that a reference names."""
    if "$ref" not in schema:
        return schema
    found = SCHEMA["definitions"][schema["$ref"].removeprefix("#/definitions/")]
    assert isinstance(found, dict)
    return found


def sections(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with named properties, by its dotted path."""
    schema = resolved(schema)
    if "properties" in schema:
        yield path, schema
        for name, inner in schema["properties"].items():
            yield from sections(inner, f"{path}{name}.")


def problems(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """What is wrong with a value, by the parts of JSON Schema that the file uses."""
    schema = resolved(schema)
    if "anyOf" in schema:
        fits = any(not problems(value, each, path) for each in schema["anyOf"])
        return [] if fits else [f"{path}: {value!r} fits nothing"]
    if not is_of_type(value, schema.get("type", [])):
        return [f"{path}: {value!r} is no {schema['type']}"]
    inner: list[str] = []
    if isinstance(value, list):
        items = [problems(each, schema.get("items", {}), f"{path}[]") for each in value]
        inner = [each for found in items for each in found]
    elif isinstance(value, dict):
        inner = [each for name in value for each in member_problems(value, name, schema, path)]
    return [*bound_problems(value, schema, path), *inner]


def is_of_type(value: Any, names: str | list[str]) -> bool:
    wanted = [TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    if isinstance(value, bool) and wanted:
        return bool in wanted
    return not wanted or isinstance(value, tuple(wanted))


def bound_problems(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{path}: {value!r} does not match"
    if isinstance(value, int) and not value >= schema.get("minimum", value):
        yield f"{path}: {value!r} is too small"
    if isinstance(value, int) and not value <= schema.get("maximum", value):
        yield f"{path}: {value!r} is too large"


def member_problems(
    value: dict[str, Any], name: str, schema: dict[str, Any], path: str
) -> list[str]:
    inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
    if inner is False:
        return [f"{path}.{name}: not in the schema"]
    return problems(value[name], {} if inner is True else inner, f"{path}.{name}")


def test_the_generated_file_is_current() -> None:
    assert generate_helm_values.main(["--check"]) == 0


def test_an_outdated_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outdated = generate_helm_values.content().replace("7002", "7003")
    file = tmp_path / "services.yaml"
    file.write_text(outdated, encoding="utf-8")
    monkeypatch.setattr(generate_helm_values, "FILE", file)
    assert generate_helm_values.main(["--check"]) == 1
    assert generate_helm_values.main([]) == 0
    assert generate_helm_values.main(["--check"]) == 0


def test_copies_of_rules_alerts_and_dashboards_follow_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = ROOT / "deploy" / "observability"
    sources = [profile / "prometheus" / name for name in ("rules.yml", "alerts.yml")]
    sources += (profile / "grafana" / "dashboards").glob("*.json")
    wanted = {source.name: source.read_text(encoding="utf-8") for source in sources}
    monkeypatch.setattr(generate_helm_values, "MONITORING", tmp_path)
    assert generate_helm_values.main(["--check"]) == 1
    assert generate_helm_values.main([]) == 0
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == wanted
    for name, text in (("alerts.yml", "groups: []\n"), ("other.json", "{}")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert generate_helm_values.main(["--check"]) == 1
        assert generate_helm_values.main([]) == 0
        assert generate_helm_values.main(["--check"]) == 0
    assert set(wanted) == {file.name for file in tmp_path.iterdir()}


def test_the_schema_takes_the_charts_own_values_and_the_examples() -> None:
    assert problems(VALUES, SCHEMA, "values") == []
    for example in EXAMPLES.glob("*.yaml"):
        values = yaml.safe_load(example.read_text(encoding="utf-8"))
        assert problems(values, SCHEMA, example.name) == []


def test_the_schema_takes_the_documented_commands_as_they_are_written() -> None:
    quoted = re.findall(r"^\$ helm (?:install|upgrade) ", PAGE.read_text("utf-8"), re.MULTILINE)
    documented = documented_values()
    assert len(documented) == len(quoted) > 0
    for name, values in documented.items():
        assert problems(values, SCHEMA, name) == []


@pytest.mark.parametrize("tag", ["cuda", "1.0", 1, 0, 20261122])
def test_a_tag_is_text_or_a_whole_number(tag: str | int) -> None:
    assert problems({"image": {"compute": {"tag": tag}}}, SCHEMA, "values") == []


def test_set_reads_whole_numbers_and_words_and_set_string_does_not() -> None:
    texts = ("1", "0", "007", "1.0", "true", "null", "cuda")
    assert [typed(text) for text in texts] == [1, 0, "007", "1.0", True, None, "cuda"]
    assert values_of(["--set", "a.b=1,a.c=2", "--set-string", "a.b=1"]) == {"a": {"b": "1", "c": 2}}
    with pytest.raises(ValueError, match="--set-json"):
        values_of(["--set-json", "a=1"])


def test_the_schema_knows_every_value_and_no_other() -> None:
    for path, schema in sections(SCHEMA):
        found: Any = VALUES
        for name in path.split(".")[:-1]:
            found = found[name]
        if path.split(".")[-2:-1] in (["resources"], ["requests"], ["limits"]):
            continue  # a part of what Kubernetes takes
        assert set(schema["properties"]) - (OF_HELM if not path else set()) == set(found), path
        assert schema["additionalProperties"] is False, path


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    text = json.dumps(SCHEMA)
    used = set(re.findall(r'"#/definitions/(\w+)"', text))
    assert used == set(SCHEMA["definitions"])


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"gpus": 2}},
        {"rollout": {"replicas": "2"}},
        {"rollout": {"replicas": True}},
        {"devices": {"kind": "tpu"}},
        {"image": {"compute": {"tag": 1.5}}},
        {"image": {"reward": {"tag": 10**17}}},
        {"storage": {"runs": {"size": "much"}}},
        {"networkPolicy": {"dnsPorts": [0]}},
        {"run": {"settings": ["--restart"]}},
    ],
    ids=str,
)
def test_the_schema_refuses_other_values(values: dict[str, Any]) -> None:
    assert problems(values, SCHEMA, "values")


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_templates_hold_no_port_and_no_path_of_the_specification(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    ports = {
        port
        for place in SERVICE_PORTS.values()
        for port in (place.port, place.health_port, place.metrics_port)
    }
    assert len(ports) == 3 * len(KINDS)
    assert not [port for port in ports if re.search(rf"\b{port}\b", text)]
    for word in ("/runs", "/jobs", "config.yaml", "sluice.launch", "10001"):
        assert word not in text


def test_names_are_those_of_the_rest_of_the_project(tmp_path: Path) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (chart["name"], chart["appVersion"]) == (project["name"], project["version"])
    images = VALUES["image"]
    assert images["compute"]["repository"] == COMPUTE_IMAGE
    assert images["reward"]["repository"] == REWARD_IMAGE
    assert VALUES["rollout"]["autoscaling"]["metric"]["name"] == DEMAND_REPLICAS.name
    certs(out=tmp_path / "certs", host=None, days=1, force=False)
    made = {file.name for file in (tmp_path / "certs").iterdir()}
    assert set(VALUES["security"]["files"].values()) <= made


def test_the_options_of_prepare_are_the_commands() -> None:
    command = get_command(application)
    context = command.make_context("sluice", [], resilient_parsing=True)
    context.resilient_parsing = False
    words = ["--quickstart", "trainer.save_freq=5", "--run-dir", "/runs/run"]
    assert {word for word in words if word.startswith("--")} == PREPARE_OPTIONS
    command.commands["prepare"].make_parser(context).parse_args(words)  # type: ignore[attr-defined]
