"""Counts what becomes of the keys in launch files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice.config.catalogue.entry import Status
from sluice.config.key_lookup import find_key, is_section
from sluice.config.loader import read_document
from sluice.config.override_files import YAML_SUFFIXES, OverrideText, read_override_file
from sluice.config.overrides import apply_overrides, parse_override
from sluice.config.schema import KeyPath
from sluice.config.settings_tree import SettingsTree, tree_of
from sluice.config.spelling import canonical, full_form
from sluice.config.standing import standing
from sluice.config.unknown_keys import unknown_key


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

    A value that changes nothing counts as not applicable, unless the key is honoured; a value that
    is refused counts as refused, and does not end the count. A line of an override file may also
    be a bare key; then its usual standing counts.

    Raises:
        ConfigError: a file cannot be read or parsed; unknown keys are no error but are reported.
    """
    files, seen = [], set()
    for path in paths:
        given = _read(path)
        keys: dict[str, Status] = {}
        for proper, spelled, status in (*_set_keys(given.settings), *_bare_keys(given.bare)):
            keys[spelled] = status
            seen.add((proper, status))
        files.append(FileCoverage(path, keys, tuple(given.unknown)))
    return Coverage(tuple(files), {s: sum(1 for _, x in seen if x is s) for s in Status})


@dataclass(slots=True)
class _Given:
    """What a file sets, keys it names without a value, and sentences about unknown keys."""

    settings: SettingsTree
    bare: list[KeyPath] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def _set_keys(settings: SettingsTree) -> Iterator[tuple[str, str, Status]]:
    for path, value in settings.leaves():
        found, spelled, proper = find_key(path), settings.written(path), ".".join(path)
        if found is not None:
            renamed = spelled != proper
            yield proper, spelled, standing(found, path, value, renamed=renamed)


def _bare_keys(paths: Sequence[KeyPath]) -> Iterator[tuple[str, str, Status]]:
    for spelled in paths:
        path = full_form(canonical(spelled))
        found = find_key(path)
        if found is not None:
            renamed = path != spelled and found.entry.status is Status.HONOURED
            status = Status.MAPPED if renamed else found.entry.status
            yield ".".join(path), ".".join(spelled), status


def _read(path: Path) -> _Given:
    if path.suffix in YAML_SUFFIXES:
        tree = tree_of(read_document(path), str(path))
        written = (tuple(tree.written(p).split(".")) for p, _ in tree.leaves() if not _accepts(p))
        return _Given(tree, [], [unknown_key(spelled) for spelled in written])
    given, known = _Given(SettingsTree()), []
    for item in read_override_file(path):
        bare = "=" not in item.text and not item.text.startswith("~")
        # The value of a bare key is not looked at.
        text = f"{item.text.removesuffix('.*')}=" if bare else item.text
        override = parse_override(text, item.source)
        if not _accepts(canonical(override.path)):
            given.unknown.append(f"{unknown_key(override.path)}{override.where}")
        elif bare:
            given.bare.append(override.path)
        else:
            known.append(OverrideText(item.text.strip().lstrip("+"), item.source))
    apply_overrides(given.settings, known, {})
    return given


def _accepts(path: KeyPath) -> bool:
    return find_key(path) is not None or is_section(path)
