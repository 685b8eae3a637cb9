"""Checks a built site: every link inside it leads somewhere, and nothing is loaded from elsewhere.

`python -m tools.docs_site.built_site build/site` prints what is wrong, and one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself; a link that a reader may follow is no part of it.
_LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
_NOT_FETCHED = {"canonical", "next", "prev", "alternate", "edit"}


@dataclass
class PageLinks(HTMLParser):
    """What one page loads, links to, and can be linked at."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes it."""
        given = {name: value for name, value in attrs if value is not None}
        if "id" in given:
            self.anchors.add(given["id"])
        source = given.get(_LOADED.get(tag, ""), "")
        if source and not (tag == "link" and set(given.get("rel", "").split()) & _NOT_FETCHED):
            self.loads.append(source)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


def problems(site: Path) -> Iterator[str]:
    """A sentence for each link that leads nowhere, and each thing that is loaded from elsewhere."""
    site = site.resolve()
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        if path.name == "404.html":  # its links begin at the server's root
            continue
        for source in page.loads:
            if urlsplit(source).netloc:
                yield f"{name}: loads {source}"
            elif not source.startswith("data:") and not _target(path, source).is_file():
                yield f"{name}: loads {source}, which is not there"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = _target(path, link) if parts.path else path
            if not target.is_file():
                yield f"{name}: {link} leads nowhere"
            elif target in pages and unquote(parts.fragment) not in {"", *pages[target].anchors}:
                yield f"{name}: {link}: no such place on that page"


def read_page(path: Path) -> PageLinks:
    """Its links."""
    page = PageLinks()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _target(page: Path, link: str) -> Path:
    path = (page.parent / unquote(urlsplit(link).path)).resolve()
    return path / "index.html" if path.is_dir() else path


def main(arguments: Sequence[str]) -> int:
    """1 if something is wrong."""
    site = Path(arguments[0])
    found = list(problems(site))
    for line in found:
        sys.stderr.write(f"{line}\n")
    pages = sum(1 for _ in site.rglob("*.html"))
    figures = {"ok": not found and pages > 1, "pages": pages, "problems": len(found)}
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
