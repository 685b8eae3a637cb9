"""Fails when the protos break clients that were generated from the previous commit's protos.

Compares with HEAD while `proto/` has uncommitted changes, otherwise with HEAD's first parent;
`PROTO_BASE=<commit>` compares with another one. Without an earlier commit there is nothing to
break, and one line reports that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def base_commit() -> str | None:
    """The commit to compare with; `None` if there is none that holds protos."""
    if shutil.which("git") is None:
        return None
    changed = _git("status", "--porcelain", "--", "proto").stdout.strip()
    wanted = os.environ.get("PROTO_BASE") or ("HEAD" if changed else "HEAD~1")
    found = _git("rev-parse", "--verify", "--quiet", f"{wanted}:proto")
    return wanted if found.returncode == 0 else None


def _extract(commit: str, folder: Path) -> None:
    archive = _git("archive", "--format=tar", commit, "proto", "buf.yaml")
    if archive.returncode != 0:
        raise SystemExit(f"git archive {commit} failed: {archive.stderr.decode()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def _buf() -> str:
    """The buf of this environment, which need not be active."""
    beside = Path(sys.executable).with_name("buf")
    found = str(beside) if beside.exists() else shutil.which("buf")
    if found is None:
        raise SystemExit("buf is not installed: run `make test`, which installs the tools")
    return found


def main() -> int:
    """Return the exit status."""
    commit = base_commit()
    if commit is None:
        sys.stdout.write("skipped: no earlier commit holds protos, so nothing can break\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        _extract(commit, Path(folder))
        return subprocess.run(
            [_buf(), "breaking", "--against", folder], cwd=ROOT, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
