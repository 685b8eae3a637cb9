"""Links between documents, and from documents to files, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS
from tests.support.source_tree import ROOT, name_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"```.*?```", re.DOTALL)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors GitHub makes of the headings."""
    headings = HEADING.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def links(document: Path) -> list[str]:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    return [link for link in LINK.findall(text) if "://" not in link and "mailto:" not in link]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_in_a_document_resolves(document: Path) -> None:
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{name_of(document)}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{name_of(document)}: {link} leaves the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(document)}: {link} has no such heading"
