"""Fetch mermaid, which draws the diagrams, from npm's registry; once, by version and digest."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.docs_site.hooks import MERMAID

VERSION = "11.17.2"
SHA256 = "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8"
_MEMBER = "package/dist/mermaid.min.js"


def main() -> int:
    """Return the exit status."""
    if MERMAID.is_file() and digest(MERMAID.read_bytes()) == SHA256:
        return 0
    if shutil.which("npm") is None:
        sys.stderr.write("npm was not found. On Debian: apt-get install nodejs npm\n")
        return 1
    content = packed()
    if digest(content) != SHA256:
        sys.stderr.write(
            f"mermaid {VERSION} has the digest {digest(content)}, expected {SHA256}: not used\n"
        )
        return 1
    MERMAID.parent.mkdir(parents=True, exist_ok=True)
    MERMAID.write_bytes(content)
    return 0


def packed() -> bytes:
    """Return the file as the package has it.

    Raises:
        SystemExit: npm cannot fetch it, and has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["npm", "pack", "--silent", f"mermaid@{VERSION}"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or not archives:
            raise SystemExit(f"npm pack mermaid@{VERSION} ended with code {done.returncode}")
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(_MEMBER)
            if member is None:
                raise SystemExit(f"mermaid {VERSION} holds no {_MEMBER}")
            return member.read()


def digest(content: bytes) -> str:
    """Return the SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
