"""Writes a resolved configuration as YAML that `load_config` reads back unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from sluice.config.run import RunConfig
from sluice.config.yaml_values import SCALAR_PATTERNS


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what our loader, not YAML 1.1, would take for something else."""


# A name such as "1e-6" is plain text in YAML 1.1 and a number in YAML 1.2.
for _tag, _pattern in SCALAR_PATTERNS:
    _Dumper.add_implicit_resolver(_tag, _pattern, None)


def dump_config(config: RunConfig) -> str:
    """The whole tree with every default written out, in the order of the schema."""
    # Escapes stay on: PyYAML writes some control characters raw otherwise and reads them as spaces.
    return yaml.dump(msgspec.to_builtins(config), Dumper=_Dumper, sort_keys=False, width=100)


def flat_settings(config: RunConfig) -> dict[str, object]:
    """Every value by its dotted key; lists stay whole."""
    return dict(_leaves("", msgspec.to_builtins(config)))


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def write_config(config: RunConfig, path: Path) -> None:
    """Writes the configuration for other processes; they never see half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(dump_config(config), encoding="utf-8")
    partial.replace(path)
