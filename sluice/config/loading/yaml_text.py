"""Read YAML as version 1.2 does, so that `1e-6` is a number and `on` a string, and write it."""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path

import msgspec
import yaml

from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.whole_file import write_whole

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
# Underscores separate thousands only: "1_5" is a band of thresholds, not 15.
_WHOLE = r"(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)"
# Whole numbers with leading zeros are text, as in overrides: verl's YAML reads them as octal.
_INT = re.compile(rf"^(?:[-+]?(?!0[0-9]){_WHOLE}|0x[0-9a-fA-F]+|0o[0-7]+)$")
_FLOAT = re.compile(
    rf"^(?:[-+]?(?!0[0-9_]+$)(?:\.[0-9]+|{_WHOLE}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
# In order: an integer matches the pattern of floats too.
SCALAR_PATTERNS = (
    ("tag:yaml.org,2002:null", _NULL),
    ("tag:yaml.org,2002:bool", _BOOL),
    ("tag:yaml.org,2002:int", _INT),
    ("tag:yaml.org,2002:float", _FLOAT),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and without silent duplicates of keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 PyYAML's own form


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> object:
    return parse_scalar(loader.construct_scalar(node))


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, object]:
    loader.flatten_mapping(node)
    mapping: dict[Hashable, object] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a plain word", key_node.start_mark
            )
        if key in mapping:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} appears twice in one mapping", key_node.start_mark
            )
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


for _tag, _pattern in SCALAR_PATTERNS:
    _Loader.add_implicit_resolver(_tag, _pattern, None)
    _Loader.add_constructor(_tag, _construct_scalar)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_scalar(text: str) -> object:
    """Return the value of a plain word: null, boolean, number, else the word itself."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        digits = text.replace("_", "")
        return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
    if _FLOAT.match(text):
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    return text


def parse_document(text: str, source: str) -> object:
    """Parse one YAML document. `source` names it in errors.

    Raises:
        ConfigError: no YAML, or a key twice in one mapping; names line and column. Or it nests
            hundreds of levels deep.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{source} is not valid YAML: {position}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    except RecursionError:
        deep = "nests lists or mappings hundreds of levels deep; write them flatter"
        raise ConfigError(f"{source} {deep}") from None


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what our loader, not YAML 1.1, would take for something else."""


# A name such as "1e-6" is plain text in YAML 1.1 and a number in YAML 1.2.
for _tag, _pattern in SCALAR_PATTERNS:
    _Dumper.add_implicit_resolver(_tag, _pattern, None)


def dump_config(config: RunConfig) -> str:
    """Return the whole tree with every default written out, in the order of the schema."""
    # Escapes stay on: PyYAML writes some control characters raw otherwise and reads them as spaces.
    return yaml.dump(msgspec.to_builtins(config), Dumper=_Dumper, sort_keys=False, width=100)


def flow_text(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=sys.maxsize)
    return text.removesuffix("\n").removesuffix("\n...")


def flat_settings(config: RunConfig) -> dict[str, object]:
    """Return every value by its dotted key; lists stay whole."""
    return flat_tree(msgspec.to_builtins(config))


def flat_tree(tree: object) -> dict[str, object]:
    """Return every value of nested mappings by its dotted key; lists stay whole."""
    return dict(_leaves("", tree))


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def write_config(config: RunConfig, path: Path) -> None:
    """Write the configuration for other processes; they never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, dump_config(config).encode())
