"""The files of the page, as they are in the package."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["PageFile", "etag_of", "page_files"]

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file with what its answer says of it."""

    body: bytes
    content_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """By the path of their address; ``/`` is the page. No other path is ever looked up on disk."""
    found = {}
    for entry in (files("sluice.dashboard") / "static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            body = entry.read_bytes()
            path = "/" if entry.name == _INDEX else f"/static/{entry.name}"
            found[path] = PageFile(body, _TYPES[suffix], etag_of(body))
    return found


def etag_of(body: bytes) -> str:
    """The same for the same bytes, in quotes."""
    return f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
