"""What to say about a key that does not exist."""

from __future__ import annotations

import difflib

from sluice.config.key_lookup import all_names, find_key, is_section
from sluice.config.schema import KeyPath
from sluice.config.spelling import canonical

MAX_SUGGESTIONS = 3


def nearest_keys(path: KeyPath) -> tuple[str, ...]:
    """Up to three known keys that were probably meant, likeliest first.

    A path that only lacks its first parts (`rollout.n`) is taken at its word; then a path with one
    part misspelt; then names beside it, the same name elsewhere, and paths that look alike.
    """
    wanted, leaf = ".".join(path), path[-1]
    known = all_names()
    same_end = [key for key in known if key.endswith(f".{wanted}")]
    if same_end:
        return tuple(same_end[:MAX_SUGGESTIONS])
    repaired = _repaired(path)
    if repaired:
        return repaired
    elsewhere = _same_branch([key for key in known if key.rpartition(".")[2] == leaf], path)
    return tuple(
        difflib.get_close_matches(wanted, elsewhere, cutoff=0.3)
        or difflib.get_close_matches(wanted, known, cutoff=0.8)
    )


def _same_branch(keys: list[str], path: KeyPath) -> list[str]:
    """The keys that share the first part of `path`, if any does."""
    return [key for key in keys if key.startswith(f"{path[0]}.")] or keys


def _repaired(path: KeyPath) -> tuple[str, ...]:
    """The path with its first wrong part replaced by names beside it, if the rest then fits."""
    wrong = _first_wrong(path)
    parents, rest = path[:wrong], path[wrong + 1 :]
    beside = keys_below(parents)
    near = _closest(path[wrong], beside)
    fitting = [(*parents, name, *rest) for name in near]
    return tuple(".".join(p) for p in fitting if is_known(p))[:MAX_SUGGESTIONS]


def _closest(word: str, names: list[str]) -> list[str]:
    """The names most like `word`, without those that are clearly less alike than the best."""
    near = difflib.get_close_matches(word, names, cutoff=0.7)
    likeness = [difflib.SequenceMatcher(None, name, word).ratio() for name in near]
    return [name for name, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.1]


def is_known(path: KeyPath) -> bool:
    """Whether `path`, in any spelling, is a key or a section."""
    proper = canonical(path)
    return is_section(proper) or is_section(path) or find_key(proper) is not None


def _first_wrong(path: KeyPath) -> int:
    return next(i for i in range(len(path)) if not is_known(path[: i + 1]))


def keys_below(parents: KeyPath) -> list[str]:
    """The names directly below a section, those of other spellings included."""
    prefix = "".join(f"{name}." for name in parents)
    below = (key[len(prefix) :] for key in all_names() if key.startswith(prefix))
    return list(dict.fromkeys(key.partition(".")[0] for key in below))


def unknown_key(path: KeyPath) -> str:
    """The sentence about a key that does not exist, with what was probably meant."""
    near = nearest_keys(path)
    wrong = _first_wrong(path)
    parents = path[:wrong]
    if near:
        return f"{'.'.join(path)}: unknown key; did you mean {' or '.join(near)}?"
    beside = keys_below(parents)
    if beside:
        hint = f"{'.'.join(parents) or 'the root'} knows {', '.join(beside)}"
    else:
        hint = f"{'.'.join(parents)} is a value and has no keys below it"
    return f"{'.'.join(path[: wrong + 1])}: unknown key; {hint}"
