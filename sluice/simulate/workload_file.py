"""Read a workload's distributions from a YAML file; docs/simulator.md has the fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import UNSET

from sluice.config.loading.yaml_text import parse_document
from sluice.config.problems import Problem, raise_problems
from sluice.config.run import expectation
from sluice.errors import ConfigError
from sluice.simulate.workload import BetaComponent, ResponseLengths, WorkloadDescription


def read_workload(file: Path) -> WorkloadDescription:
    """Read a description; fields that are left out are as in the mixtures of docs/simulator.md.

    Raises:
        ConfigError: the file cannot be read, or fields are wrong: all of them are named, each with
            its value and the expected one.
    """
    source = f"--workload {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}; give a YAML file") from error
    document = parse_document(text, source)
    raise_problems(list(_problems(WorkloadDescription, document, "")), source)
    return msgspec.convert(document, WorkloadDescription)


def _problems(kind: type[msgspec.Struct], value: object, at: str) -> Iterator[Problem]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    names = ", ".join(fields)
    if not isinstance(value, dict):
        yield Problem(at or "the file", value, f": expected a mapping of {names}")
        return
    prefix = f"{at}." if at else ""
    for name in value.keys() - fields.keys():
        yield Problem(f"{prefix}{name}", value[name], "is no field", f"the fields are {names}")
    for name, field in fields.items():
        found = value.get(name, UNSET)
        if name == "lengths" and found is not UNSET:
            yield from _problems(ResponseLengths, found, name)
        elif name == "pass_rates" and isinstance(found, list) and found:
            for number, component in enumerate(found):
                yield from _problems(BetaComponent, component, f"{name}[{number}]")
        elif found is not UNSET:
            yield from _wrong(f"{prefix}{name}", found, field.type)
        elif field.required:
            yield Problem(f"{prefix}{name}", UNSET, f"is missing: {expectation(field.type)}")


def _wrong(path: str, value: object, annotation: object) -> Iterator[Problem]:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        yield Problem(path, value, f": expected {expectation(annotation)}")
