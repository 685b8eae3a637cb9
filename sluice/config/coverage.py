"""Counts what becomes of the keys in launch files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.config.catalogue.entry import Status
from sluice.config.key_lookup import find_key, is_section
from sluice.config.loader import read_document
from sluice.config.override_files import OverrideText, read_override_file
from sluice.config.overrides import apply_overrides, parse_override
from sluice.config.schema import KeyPath
from sluice.config.settings_tree import SettingsTree, tree_of
from sluice.config.spelling import canonical
from sluice.config.standing import chosen_engine, standing
from sluice.config.unknown_keys import unknown_key

YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class FileCoverage:
    """The keys of one file.

    Attributes:
        file: as given.
        keys: spelling as written to status, in the order of the file; unknown keys are left out.
        unknown: sentences, one for each key that is not known, with what was probably meant.
    """

    file: Path
    keys: dict[str, Status]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The keys of several files.

    Attributes:
        files: one for each file, in the order given.
        counts: distinct keys (in sluice's spelling) over all files for each status.
    """

    files: tuple[FileCoverage, ...]
    counts: dict[Status, int]

    @property
    def num_unknown(self) -> int:
        """Unknown keys, summed over the files."""
        return sum(len(file.unknown) for file in self.files)


def coverage(paths: Sequence[Path]) -> Coverage:
    """What becomes of every key in `paths`: YAML files (.yaml, .yml) or override files (others).

    A value that asks for what happens anyway counts as honoured; a value that is refused counts as
    refused, and does not end the count.

    Raises:
        ConfigError: a file cannot be read or parsed; unknown keys are no error but are reported.
    """
    files, seen = [], set()
    for path in paths:
        settings, unknown = _settings(path)
        engine = chosen_engine(settings)
        keys: dict[str, Status] = {}
        for place, value in settings.leaves():
            found, spelled = find_key(place), settings.written(place)
            if found is None:
                continue
            proper = ".".join(place)
            status = standing(found, place, value, engine=engine, renamed=spelled != proper)
            keys[spelled] = status
            seen.add((proper, status))
        files.append(FileCoverage(path, keys, tuple(unknown)))
    return Coverage(tuple(files), {s: sum(1 for _, x in seen if x is s) for s in Status})


def _settings(path: Path) -> tuple[SettingsTree, list[str]]:
    """What the file sets, and sentences about its unknown keys."""
    document = read_document(path) if path.suffix in YAML_SUFFIXES else {}
    tree = tree_of(document, str(path))
    unknown = [
        unknown_key(tuple(tree.written(place).split(".")))
        for place, _ in tree.leaves()
        if not _is_accepted(place)
    ]
    known = []
    for item in [] if path.suffix in YAML_SUFFIXES else read_override_file(path):
        override = parse_override(item.text, item.source)
        if _is_accepted(canonical(override.path)):
            known.append(OverrideText(item.text.strip().lstrip("+"), item.source))
        else:
            unknown.append(f"{unknown_key(override.path)}{override.where}")
    apply_overrides(tree, known, {})
    return tree, unknown


def _is_accepted(path: KeyPath) -> bool:
    return find_key(path) is not None or is_section(path)
