"""What tests of the rollout service share."""

from __future__ import annotations

import time

import pytest

from services.rollout.engines.embedded.loop import GenerationLoop


class Steps:
    """How many steps an engine of this process may take; ``None``: any number.

    With none left it samples nothing, and takes and gives up requests as ever.
    """

    left: int | None = None


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Holds what an engine samples where a test wants it, however slow the test is."""
    allowed, step = Steps(), GenerationLoop.step

    def held(loop: GenerationLoop) -> None:
        if allowed.left == 0:
            time.sleep(0.001)
            return
        if allowed.left is not None:
            allowed.left -= 1
        step(loop)

    monkeypatch.setattr(GenerationLoop, "step", held)
    return allowed
