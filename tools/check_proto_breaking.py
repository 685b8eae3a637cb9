"""Fails when the protos break clients that were generated from the previous commit's protos.

Compares with HEAD while `proto/` has uncommitted changes, otherwise with HEAD's first parent;
`PROTO_BASE=<commit>` compares with another one. Without an earlier commit there is nothing to
break, and one line reports that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).with_name("buf")  # of this environment, which need not be active


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def main() -> int:
    """Return the exit status."""
    changed = _git("status", "--porcelain", "--", "proto").stdout.strip()
    base = os.environ.get("PROTO_BASE") or ("HEAD" if changed else "HEAD~1")
    archive = _git("archive", "--format=tar", base, "proto", "buf.yaml")
    if archive.returncode != 0:
        sys.stdout.write("skipped: no earlier commit holds protos, so nothing can break\n")
        return 0
    command = [str(BUF), "breaking", "--against", "-#format=tar"]
    return subprocess.run(command, cwd=ROOT, input=archive.stdout, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
