"""Which parts of old checkpoints go when a new one is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ACTOR_FOLDER, CRITIC_FOLDER = "actor", "critic"


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint on disk and the models in it (``actor``, ``critic``)."""

    folder: Path
    roles: frozenset[str]


def superfluous_roles(
    newest_first: Sequence[StoredCheckpoint], keep: Mapping[str, int | None]
) -> dict[Path, frozenset[str]]:
    """The models that go, by folder: of each role all but the newest `keep`.

    Args:
        newest_first: all complete checkpoints.
        keep: by role, at least 1; ``None``, or a role that is not named, keeps all.
    """
    found: dict[Path, frozenset[str]] = {}
    for role, count in keep.items():
        holders = [one.folder for one in newest_first if role in one.roles]
        for folder in holders[count:] if count is not None else ():
            found[folder] = found.get(folder, frozenset()) | {role}
    return found


def delete_folder(folder: Path) -> None:
    """Remove a checkpoint so that a crash on the way leaves none that looks complete."""
    expired = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(expired, ignore_errors=True)
    folder.rename(expired)
    shutil.rmtree(expired, ignore_errors=True)


def delete_roles(
    stored: StoredCheckpoint, roles: frozenset[str], unlist: Callable[[Path, frozenset[str]], None]
) -> None:
    """Remove models from a checkpoint that keeps another one.

    Args:
        stored: the checkpoint.
        roles: what goes; not all of its models.
        unlist: takes their files off the checkpoint's list, which comes first: files that are
            listed must be there, those that are not do no harm.
    """
    unlist(stored.folder, roles)
    for role in roles:
        shutil.rmtree(stored.folder / role, ignore_errors=True)
