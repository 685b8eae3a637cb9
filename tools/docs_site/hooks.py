"""Hooks of mkdocs (mkdocs.yml names this file): links to source, mermaid.

The pages are written to be read in the repository. There a link to a source file works; on the site
it leads to the repository's own pages if SLUICE_REPOSITORY_URL names them (without the file's path,
such as a forge's `.../blob/main`), and is a plain word that shows the path otherwise.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
URL_VARIABLE = "SLUICE_REPOSITORY_URL"
MERMAID = ROOT / "build" / "docs-packages" / "mermaid.min.js"
MERMAID_ON_SITE = "assets/mermaid.min.js"
# The entry page on the forge and the entry page of the site tell the same.
_SAME_PAGE = {"README.md": "index.md"}

_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add mermaid, so that no page fetches it from elsewhere."""
    from mkdocs.structure.files import File

    if not MERMAID.is_file():
        raise SystemExit(f"{MERMAID} is not there; build the site with `make docs`")
    files.append(File.generated(config, MERMAID_ON_SITE, abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links that lead out of the site."""
    del config, files
    return with_site_links(markdown, page.file.src_uri, os.environ.get(URL_VARIABLE, ""))


def with_site_links(markdown: str, source: str, repository_url: str) -> str:
    """Return a page's text with mended links out of docs/; blocks of code stay as they are.

    Args:
        source: the page's path below docs/.
        repository_url: what a file's path in the repository is appended to; empty: no links.
    """
    mend = _mender(source, repository_url)
    parts = _FENCE.split(markdown)  # text and blocks of code take turns
    return "".join(part if index % 2 else _LINK.sub(mend, part) for index, part in enumerate(parts))


def _mender(source: str, repository_url: str) -> Callable[[re.Match[str]], str]:
    folder = posixpath.dirname(posixpath.join("docs", source))

    def mended(link: re.Match[str]) -> str:
        target, text = link["target"], link["text"]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return link[0]
        if path in _SAME_PAGE:
            page = posixpath.relpath(posixpath.join("docs", _SAME_PAGE[path]), folder)
            return f"[{text}]({page})"
        if repository_url:
            return f"[{text}]({repository_url.rstrip('/')}/{path}{link['anchor'] or ''})"
        return f'<span title="{html.escape(path)}">{text}</span>'

    return mended
