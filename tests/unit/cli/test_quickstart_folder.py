"""Where a quickstart may write."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.run import quickstart as quickstart_module
from sluice.cli.run.quickstart import quickstart
from sluice.errors import ConfigError


def test_a_quickstart_refuses_a_folder_that_sluice_did_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(quickstart_module, "prepare", lambda *given, **_: made.append(given))
    theirs = tmp_path / "metrics.jsonl"
    theirs.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="sluice did not make it"):
        quickstart(None, task="quickstart", seed=0, run_dir=tmp_path)
    assert made == []
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
