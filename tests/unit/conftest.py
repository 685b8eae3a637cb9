"""What unit tests of several folders share."""

from __future__ import annotations

import pytest

from sluice.config.run import RunConfig


@pytest.fixture
def tried_scorers(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations whose scorer `sluice prepare` would try; it measures no prompts either."""
    tried: list[RunConfig] = []

    def note(config: RunConfig, *_: object) -> None:
        tried.append(config)

    def grade(*_: object) -> None:
        raise AssertionError("`sluice prepare` grades nothing: a judge may be out of its reach")

    monkeypatch.setattr("sluice.cli.run.prepare.try_responses", note)
    monkeypatch.setattr("sluice.doctor.reward.try_responses", grade)
    monkeypatch.setattr("sluice.doctor.prompts.measure", lambda _, rows: [1] * len(rows))
    return tried
