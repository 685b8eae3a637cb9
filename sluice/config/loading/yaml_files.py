"""Read a YAML file of settings over the user's own files that its Hydra ``defaults`` name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from sluice.config.loading.keys import KeyPath
from sluice.config.loading.yaml_text import parse_document
from sluice.config.problems import shown
from sluice.config.run import RunConfig, field_types
from sluice.errors import ConfigError

VERLS_OWN = re.compile(r"(?:_generated_)?ppo_(?:\w+_)?trainer|legacy_reward_impl")
"""Names of verl's configurations: the catalogue knows their values."""

VERLS_ESTIMATOR = "gae"
"""``algorithm.adv_estimator`` of verl's trainers, the one default that trains something else."""

_VERLS_FOLDER = ("verl", "trainer", "config")
_PACKAGE = re.compile(r"^# *@package +(\S+)", re.MULTILINE)
_SELF = "_self_"


def read_document(path: Path) -> Mapping[str, object]:
    """Return the mapping in a YAML file; empty for an empty file.

    Below it are the files that its ``defaults`` name, in Hydra's order, if they lie beside it or in
    a folder of its ``hydra.searchpath``. Groups of files that are not there, such as verl's, stay
    in ``defaults``; verl's trainers do not: they set verl's estimator.

    Raises:
        ConfigError: a file cannot be read, is no YAML, or holds something else; one is not there,
            or stands below itself; or verl's own come after others, whose values they replace.
    """
    mapping_and_text = _read_mapping(path)
    composition = _Composition([path.parent, *_search_folders(mapping_and_text[0])])
    composition.add(path, mapping_and_text, "", "", _Parent())
    if isinstance(hydra := composition.values.get("hydra"), dict):
        hydra.pop("searchpath", None)
    if composition.unread:
        composition.values["defaults"] = composition.unread
    return composition.values


def _read_mapping(path: Path) -> tuple[dict[str, object], str]:
    """Return the mapping in one file, and its text."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"configuration file {path} does not exist; give the path of a YAML file "
            "or a launch script"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {error}; give a YAML file as UTF-8 text "
            "(in a run's folder: config.yaml)"
        ) from error
    document = parse_document(text, str(path))
    if document is None:
        return {}, text
    if not isinstance(document, dict):
        raise ConfigError(
            f"configuration file {path} holds {shown(document)}; expected sections such as "
            f"{', '.join(field_types(RunConfig))}"
        )
    return document, text


def _search_folders(document: Mapping[str, object]) -> Iterator[Path]:
    """Yield the folders of the ``hydra.searchpath``, without packages."""
    hydra = document.get("hydra")
    paths = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    for url in paths if isinstance(paths, list) else ():
        if str(url).startswith("file://"):
            yield Path(str(url).removeprefix("file://"))


@dataclass(slots=True)
class _Composition:
    """Files put together.

    Attributes:
        folders: where files are looked for, in order.
        values: of the files that were added; later ones win.
        unread: entries of ``defaults`` without a file here.
    """

    folders: list[Path]
    values: dict[str, object] = field(default_factory=dict)
    unread: list[object] = field(default_factory=list)

    def add(
        self,
        file: Path,
        mapping_and_text: tuple[dict[str, object], str],
        name: str,
        package: str,
        parent: _Parent,
    ) -> None:
        """Add a file and, in their order, the files that its ``defaults`` name.

        `mapping_and_text` is what `_read_mapping` read of it; `name` and `package` are as the entry
        has them, which names it.
        """
        if file in parent.files:
            raise ConfigError(f"configuration file {file}: its defaults lead back to it")
        document, text = mapping_and_text
        header = _PACKAGE.search(text)
        group = name.removeprefix("/").rpartition("/")[0]
        place = parent.below(package or (header[1] if header else group.replace("/", ".")))
        if parent.group and not name.startswith("/"):
            group = f"{parent.group}/{group}".removesuffix("/")
        within = _Parent((*parent.files, file), place, group)
        entries = document.get("defaults")
        if isinstance(entries, list):
            del document["defaults"]
        else:
            entries = []
        for entry in entries if _SELF in entries else [*entries, _SELF]:
            if entry == _SELF:
                nested = reduce(lambda inner, name: {name: inner}, reversed(place), document)
                self.values = _merge(self.values, nested)
            else:
                self._add_entry(entry, within)

    def _add_entry(self, entry: object, parent: _Parent) -> None:
        for name, package in _chosen_files(entry):
            if file := self._find_file(name, parent.group):
                self.add(file, _read_mapping(file), name, package, parent)
            elif isinstance(entry, str):
                self._add_verl_defaults(name.removeprefix("/"), parent.files[-1])
            elif entry not in self.unread:
                self.unread.append(entry)

    def _find_file(self, name: str, group: str) -> Path | None:
        """Return the user's file of a name in a group, or in none after a ``/``."""
        is_verls = "/" in name or VERLS_OWN.fullmatch(name)
        for folder in self.folders:
            within = folder if name.startswith("/") else folder / group
            file = within / f"{name.removeprefix('/')}.yaml"
            in_verl = folder.resolve().parts[-3:] == _VERLS_FOLDER
            if file.is_file() and not (is_verls and in_verl):
                return file
        return None

    def _add_verl_defaults(self, name: str, file: Path) -> None:
        """Add what a file of verl's, which is not read, sets otherwise than sluice."""
        if not VERLS_OWN.fullmatch(name):
            folders = " or ".join(str(folder) for folder in self.folders)
            raise ConfigError(
                f"configuration file {file}: its defaults name {name}, and there is no {name}.yaml "
                f"in {folders}; put it there, or its keys into this file"
            )
        of_verl: dict[str, object] = {"algorithm": {"adv_estimator": VERLS_ESTIMATOR}}
        if self.values not in ({}, of_verl):
            raise ConfigError(
                f"configuration file {file}: its defaults name {name} after other settings, which "
                f"its values replace; move {name} to the start of defaults"
            )
        if name.endswith("_trainer"):
            self.values = of_verl


@dataclass(frozen=True, slots=True)
class _Parent:
    """The files that name a file, outermost first; where the last one's keys stand; its group."""

    files: tuple[Path, ...] = ()
    place: KeyPath = ()
    group: str = ""

    def below(self, package: str) -> KeyPath:
        """Return the place of a package that is named in the last file."""
        if package.startswith("_global_"):
            return tuple(package.split(".")[1:])
        return (*self.place, *(name for name in package.split(".") if name not in ("", "_here_")))


def _chosen_files(entry: object) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that an entry chooses, with its package."""
    if isinstance(entry, str):
        name, _, package = entry.partition("@")
        yield name.removesuffix(".yaml"), package
    elif isinstance(entry, Mapping):
        for key, choice in entry.items():
            group, _, package = str(key).removeprefix("optional ").partition("@")
            for option in choice if isinstance(choice, list) else [choice]:
                if option is not None:
                    yield f"{group}/{option}", package


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Return nested mappings in one; `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        present = merged.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            value = _merge(present, value)
        merged[key] = value
    return merged
