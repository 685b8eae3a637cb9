"""No key of the configuration is accepted, typed, and then read by nobody."""

from __future__ import annotations

import ast

import pytest

from sluice.config.catalogue.table import KeyStatus
from sluice.config.explain import explain_key
from sluice.config.run import RunConfig, field_types, section_type
from sluice.config.schema.section import Section
from tests.support.attribute_reads import attribute_reads
from tests.support.source_tree import ROOT, python_files, syntax_tree

_TEXT = "images are not read"
EXCEPTIONS: dict[str, str] = {
    "data.image_patch_size": _TEXT,
    "data.mm_processor_kwargs": _TEXT,
    "data.trust_remote_code": "the model's key decides for its tokenizer too",
    "actor_rollout_ref.actor.clip_ratio": "put into clip_ratio_low and _high while loading",
}
"""Keys that no service reads. docs/configuration.md says of each what happens instead."""

CONSENTS = {"sluice.sampling.train_truncated"}
"""Keys that only the rules read: they permit what the start refuses otherwise."""

CONFIG = ROOT / "sluice" / "config"
MEANINGS = (
    CONFIG / "derived.py",
    CONFIG / "deadlines.py",
    CONFIG / "parallel_layout.py",
    CONFIG / "device_split.py",
)
"""What services ask about several keys at once; all else in sluice.config checks and describes."""


def sections(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, type[Section]]:
    """Every section by its dotted path, which ends in a dot; the root's is empty."""
    found = {prefix: section}
    for name, annotation in field_types(section).items():
        inner = section_type(annotation)
        if inner is not None:
            found |= sections(inner, f"{prefix}{name}.")
    return found


def members() -> dict[str, dict[str, str]]:
    """Fields of every section class, and of those it extends, with the section each holds."""
    found = {}
    for section in sections().values():
        for kind in section.__mro__:
            if issubclass(kind, Section) and kind is not Section:
                held = {name: section_type(of) for name, of in field_types(kind).items()}
                found[kind.__name__] = {n: s.__name__ if s else "" for n, s in held.items()}
    return found


def unread(trees: list[ast.Module], declarations: list[ast.Module]) -> set[str]:
    """Dotted paths of fields and sections that `trees` do not read."""
    reads = attribute_reads(members(), trees, declarations)
    return {
        f"{prefix}{name}"
        for prefix, section in sections().items()
        for name in field_types(section)
        if not any((kind.__name__, name) in reads for kind in section.__mro__)
    }


def test_every_field_of_the_configuration_is_read_by_a_service() -> None:
    files = python_files("services", "sluice")
    own = [file for file in files if CONFIG in file.parents and file not in MEANINGS]
    others = [file for file in files if file not in own]
    found = unread([syntax_tree(file) for file in others], [syntax_tree(file) for file in own])
    assert sorted(found - set(EXCEPTIONS) - CONSENTS) == []
    assert sorted((set(EXCEPTIONS) | CONSENTS) - found) == [], "read by now: no exception is needed"


@pytest.mark.parametrize("key", EXCEPTIONS)
def test_a_key_that_no_service_reads_says_what_happens_instead(key: str) -> None:
    described = explain_key(key)
    assert described.status in (KeyStatus.MAPPED, KeyStatus.NOT_APPLICABLE)
    assert described.instead


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("def f(c: RunConfig): return c.data.seed", True),
        ("def f(c: RunConfig):\n    data, n = c.data, 1\n    return lambda: data.seed + n", True),
        (
            "class A:\n  def __init__(self, c: RunConfig): self.d = c.data\n"
            "  def f(self): return self.d.seed",
            True,
        ),
        ("@dataclass\nclass A:\n  d: DataConfig\ndef f(a: A | None): return a and a.d.seed", True),
        ("def f(c: RunConfig):\n  for d in (c.data, c.critic): print(d.seed)", True),
        (
            "def f(c: RunConfig): return section(c).seed\n"
            "def section(c: RunConfig) -> DataConfig: return c.data",
            True,
        ),
        ("def f(c: RunConfig): return c.trainer.seed", False),
        ("def f(seed, rows): return rows.seed", False),
        ("def f(c: RunConfig): c.data; return 'seed'", False),
    ],
)
def test_a_read_is_found_through_names_attributes_and_results(code: str, read: bool) -> None:
    assert ("data.seed" not in unread([ast.parse(code)], [])) is read
