"""A launch that does not fit is given the smallest change that does, within what may be changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.config.loading.loader import load_config
from sluice.config.memory.devices import device_kind
from sluice.config.memory.layouts import own_training_layout
from sluice.config.memory.shape import shape_of
from sluice.config.memory.training import training_memory
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.plan import launch_plan as module
from sluice.plan.dry_run import DryRunAsked, PassBytes
from sluice.plan.launch_plan import PlannedLaunch, launch_plan, planned_model

LAUNCHES = Path(__file__).resolve().parents[2] / "data" / "launches"
DEVICES = json.loads((LAUNCHES / "devices.json").read_text(encoding="utf-8"))
FREE = (
    "actor_rollout_ref.actor.fsdp_config.",
    "actor_rollout_ref.model.enable_gradient_checkpointing=",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=",
    "sluice.placement=",
)


@pytest.fixture
def estimating(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Dry runs that answer by the estimate; the configurations they were asked about."""
    seen: list[RunConfig] = []

    def answer_of(_: str, asked: DryRunAsked, *__: object, **___: object) -> tuple[Any, str]:
        config = msgspec.convert(asked.config, RunConfig)
        seen.append(config)
        return [counted(config, asked.model, n) for n in asked.layers], ""

    monkeypatch.setattr(module, "answer_of", answer_of)
    return seen


def counted(config: RunConfig, model: Any, layers: int) -> PassBytes:
    shape = shape_of({**model, "num_hidden_layers": layers})
    memory = training_memory(shape, own_training_layout(config))
    parts = memory.gathered + memory.activations + memory.logits
    parameters = round(memory.parameters)
    return PassBytes(
        parameters=parameters,
        gradients=parameters,
        moments=2 * parameters,
        log_prob=parameters,
        kept=0,
        forward=2 * parameters,
        backward=2 * parameters + round(parts),
        step=4 * parameters,
        moved={},
    )


def plan_of(name: str, *overrides: str, gib: int = 0) -> PlannedLaunch:
    row = DEVICES[name]
    device = device_kind(f"{gib or row['device_gib']}GB")
    return launch_plan(
        LAUNCHES / f"{name}.overrides", overrides, planned_model(row["model"]), device
    )


def test_a_launch_that_fits_is_left_as_it_is(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("dapo-qwen3-32b-fsdp2-npu")
    assert found.fits
    assert found.fits_with == ()
    assert len(estimating) == 1


def test_recompute_is_the_smallest_change_for_long_rows(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("grpo-8xa100")
    assert not found.fits
    assert found.fits_with == ("actor_rollout_ref.model.enable_gradient_checkpointing=true",)
    assert found.trainer.peak <= found.device.usable_bytes


def test_an_engine_that_is_too_small_gets_more_devices(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("dapo-qwen3-32b-fsdp2-npu", gib=24)
    assert found.fits_with is not None
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=8" in found.fits_with
    assert found.engine.fits(found.device)


@pytest.mark.parametrize("name", DEVICES)
def test_nothing_but_layout_recompute_dtypes_and_split_is_changed(
    name: str, estimating: Sequence[RunConfig]
) -> None:
    found = plan_of(name, gib=max(24, DEVICES[name]["device_gib"] // 2))
    for override in found.fits_with or ():
        assert override.startswith(FREE), override
    written = load_config(LAUNCHES / f"{name}.overrides", [])
    for one in estimating:
        assert one.data == written.data
        assert one.algorithm == written.algorithm
        assert one.actor_rollout_ref.rollout.n == written.actor_rollout_ref.rollout.n


def test_the_printed_overrides_are_read_as_the_plan_that_fits(
    estimating: Sequence[RunConfig],
) -> None:
    found = plan_of("grpo-8xa100", gib=40)
    assert found.fits_with
    again = plan_of("grpo-8xa100", *found.fits_with, gib=40)
    assert again.fits
    assert again.split == found.split


def test_what_nothing_makes_fit_is_said(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("dapo-qwen3-235b-megatron", gib=8)
    assert not found.fits
    assert found.fits_with is None
    assert found.trainer.peak > found.device.usable_bytes


def test_a_model_is_a_folder_or_a_published_name(tmp_path: Path) -> None:
    content = {**planned_model("Qwen3-8B").content, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": content}), encoding="utf-8")
    assert planned_model(str(tmp_path)).shape.layers == 2
    assert planned_model("Qwen3-VL-30B-A3B-Instruct").encoder > 0
    with pytest.raises(ConfigError, match=r"neither a folder with a config.json nor one of"):
        planned_model("unknown-8B")
