"""What unit tests of several folders share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sluice.config.run import RunConfig


@pytest.fixture
def tried_scorers(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations whose scorer `sluice prepare` would try, which takes a process of its own."""
    tried: list[RunConfig] = []

    def note(config: RunConfig, _rows: Sequence[object]) -> None:
        tried.append(config)

    monkeypatch.setattr("sluice.cli.run.prepare.try_scorer", note)
    return tried
