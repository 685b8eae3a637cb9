"""Plans whose dry runs of the trainer answer at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from sluice.config.run import RunConfig
from sluice.plan import launch_plan
from sluice.plan.dry_run import DryRunRequest, PassBytes

Counting = Callable[[RunConfig, Mapping[str, object]], PassBytes]
NOTHING = PassBytes(
    parameters=0,
    gradients=0,
    moments=0,
    log_prob=0,
    kept=0,
    forward=0,
    backward=0,
    step=0,
    moved={},
)


def answer_dry_runs(monkeypatch: pytest.MonkeyPatch, counting: Counting) -> list[RunConfig]:
    """Have `counting` answer, from the configuration and the model's config.json.

    Returns:
        The configurations of all dry runs, in their order.
    """
    seen: list[RunConfig] = []

    def ask_module(_: str, asked: DryRunRequest, *__: object, **___: object) -> tuple[Any, str]:
        config = msgspec.convert(asked.config, RunConfig)
        seen.append(config)
        models = ({**asked.model, "num_hidden_layers": layers} for _, layers in asked.runs)
        return [counting(config, model) for model in models], ""

    monkeypatch.setattr(launch_plan, "ask_module", ask_module)
    return seen
