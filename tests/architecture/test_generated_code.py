"""The committed generated code is what the protos give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.source_tree import ROOT
from tools.generate_protos import INIT, differences


def test_the_committed_stubs_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/generate_protos.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_changed_a_missing_and_a_left_over_file_are_each_named(tmp_path: Path) -> None:
    committed, fresh = tmp_path / "committed", tmp_path / "fresh"
    for base in (committed, fresh):
        (base / "sluice/api").mkdir(parents=True)
        (base / "sluice/api/__init__.py").write_text(INIT)
    (committed / "sluice/api/changed.py").write_text("a = 1\n")
    (fresh / "sluice/api/changed.py").write_text("a = 2\n")
    (committed / "sluice/api/old_pb2.py").write_text("")
    (fresh / "sluice/api/new_pb2.pyi").write_text("")
    assert differences(committed, fresh) == [
        "sluice/api/changed.py: differs",
        "sluice/api/new_pb2.pyi: is not committed",
        "sluice/api/old_pb2.py: comes from no proto any more",
    ]
