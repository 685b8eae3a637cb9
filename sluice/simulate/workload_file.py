"""Read a workload's distributions from a YAML or JSON file; docs/simulator.md has the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import msgspec

from sluice.config.loading.yaml_text import parse_document
from sluice.config.problems import shown
from sluice.errors import ConfigError
from sluice.simulate.workload import ResponseLengths, WorkloadDescription


@dataclass(frozen=True, slots=True)
class _Number:
    """A field that holds one number; without a default it is required."""

    low: float
    high: float
    default: float | None
    is_whole: bool = False

    @property
    def expected(self) -> str:
        kind = "whole number" if self.is_whole else "number"
        return f"give a {kind} from {self.low:g} to {self.high:,.0f}"

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        return self.low <= value <= self.high


_LENGTHS, _SET = ResponseLengths(), WorkloadDescription(())
_OF_COMPONENT = {
    "alpha": _Number(0.01, 1e6, None),
    "beta": _Number(0.01, 1e6, None),
    "weight": _Number(0.001, 1e6, 1.0),
}
_OF_LENGTHS = {
    "median_tokens_solved": _Number(1, 1e7, _LENGTHS.median_tokens_solved),
    "median_tokens_unsolved": _Number(1, 1e7, _LENGTHS.median_tokens_unsolved),
    "sigma_between_prompts": _Number(0, 5, _LENGTHS.sigma_between_prompts),
    "sigma_within_prompt": _Number(0, 5, _LENGTHS.sigma_within_prompt),
    "max_tokens": _Number(2, 1e7, _LENGTHS.max_tokens, is_whole=True),
}
_OF_SET = {
    "num_prompts": _Number(1, 1e7, _SET.num_prompts, is_whole=True),
    "drift_per_version": _Number(-1, 1, _SET.drift_per_version),
}


def read_workload(file: Path) -> WorkloadDescription:
    """Read a description; fields that are left out are as in the mixtures of docs/simulator.md.

    Args:
        file: JSON if it is named so, else YAML.

    Raises:
        ConfigError: the file cannot be read, or fields are wrong: all of them are named, each with
            its value and the remedy.
    """
    document, problems = _document(file), list[str]()
    names = ("pass_rates", "lengths", *_OF_SET)
    _refuse_unknown("", document, names, problems)
    components = _components(document.get("pass_rates"), problems)
    lengths = _section("lengths", document.get("lengths", {}), _OF_LENGTHS, problems)
    of_set = _numbers("", document, _OF_SET, problems)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        found = problems[0] if len(problems) == 1 else f"{len(problems)} problems{lines}"
        raise ConfigError(f"--workload {file}: {found}")
    fields = {"pass_rates": components, "lengths": lengths, **of_set}
    return msgspec.convert(fields, WorkloadDescription)


def _document(file: Path) -> Mapping[object, object]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"--workload {file}: there is no such file; give the path of a YAML or JSON file"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--workload {file}: it cannot be read: {error}") from error
    document = _parsed(text, file)
    if not isinstance(document, dict):
        raise ConfigError(
            f"--workload {file}: it holds {shown(document)}; give a mapping with pass_rates"
        )
    return document


def _parsed(text: str, file: Path) -> object:
    if file.suffix.lower() != ".json":
        return parse_document(text, f"--workload {file}")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"--workload {file} is not valid JSON: {error}; see the example of --help"
        ) from error


def _components(value: object, problems: list[str]) -> list[dict[str, float]]:
    if not isinstance(value, list) or not value:
        found = "is missing" if value is None else f"= {shown(value)}"
        problems.append(
            f"pass_rates {found}: give a list of Beta distributions, for example "
            "[{alpha: 0.5, beta: 2, weight: 1}]"
        )
        return []
    return [
        _section(f"pass_rates[{number}]", component, _OF_COMPONENT, problems)
        for number, component in enumerate(value)
    ]


def _section(
    path: str, value: object, fields: Mapping[str, _Number], problems: list[str]
) -> dict[str, float]:
    """Return a mapping of numbers, and nothing else."""
    if not isinstance(value, dict):
        problems.append(f"{path} = {shown(value)}: give a mapping of {', '.join(fields)}")
        return {}
    _refuse_unknown(f"{path}.", value, tuple(fields), problems)
    return _numbers(f"{path}.", value, fields, problems)


def _numbers(
    prefix: str,
    section: Mapping[object, object],
    fields: Mapping[str, _Number],
    problems: list[str],
) -> dict[str, float]:
    numbers = {}
    for name, field in fields.items():
        value = section.get(name, field.default)
        if field.holds(value):
            assert isinstance(value, int | float)
            numbers[name] = value
        elif name in section:
            problems.append(f"{prefix}{name} = {shown(value)}: {field.expected}")
        else:
            problems.append(f"{prefix}{name} is missing: {field.expected}")
    return numbers


def _refuse_unknown(
    prefix: str, section: Mapping[object, object], names: tuple[str, ...], problems: list[str]
) -> None:
    for name in section:
        if name not in names:
            near = get_close_matches(str(name), names, 1)
            remedy = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(names)}"
            problems.append(f"{prefix}{name} = {shown(section[name])}: no such field; {remedy}")
