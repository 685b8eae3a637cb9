"""The operations of an update, by formula and as torch counts them, and the share of the peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.step_measures import update_flops
from sluice.config.memory.shape import ModelShape, find_shape
from sluice.device.cpu import CpuDevice
from tests.support.tiny_policy import make_batch, make_config, make_model, save_model

PEAK = 1e12


class RatedDevice(CpuDevice):
    """A CPU with a data sheet."""

    def peak_flops(self) -> float:
        """Some number."""
        return PEAK


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_pass_has_the_operations_that_torch_counts(family: str, tmp_path: Path) -> None:
    shape = find_shape(str(save_model(tmp_path, family)))
    assert shape is not None
    model = make_model(family)
    model.set_experts_implementation("eager")  # torch does not count grouped products
    tokens = 40
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long)).logits.sum().backward()
    # torch counts every pair of tokens, ours are those that a token sees.
    expected = counter.get_total_flops()
    assert shape.training_flops(tokens, tokens, tokens**2) == pytest.approx(expected, rel=0.04)


def test_a_prompt_counts_once_for_its_group_and_skipped_rows_not_at_all(tmp_path: Path) -> None:
    shape = find_shape(str(save_model(tmp_path)))
    assert shape is not None
    batch = make_batch(1)
    (group,) = batch.groups
    alone = [
        update_flops(shape, replace(batch, groups=(replace(group, rollouts=(one,)),)), ())
        for one in group.rollouts
    ]
    prompt = group.prompt_token_ids.size
    once = shape.training_flops(prompt, 0, prompt * (prompt + 1) / 2)
    whole = sum(alone) - (len(alone) - 1) * once
    assert update_flops(shape, batch, ()) == pytest.approx(whole)
    assert update_flops(shape, batch, range(1, len(alone))) == pytest.approx(alone[0])
    assert update_flops(shape, batch, range(len(alone))) == 0.0


def test_the_share_of_the_peak_is_reported_where_the_peak_is_known(tmp_path: Path) -> None:
    config = make_config(save_model(tmp_path))
    shape: ModelShape | None = find_shape(str(tmp_path))
    assert shape is not None
    for device in (CpuDevice(), RatedDevice()):
        learner = Learner(config, ParallelContext(), total_steps=10, device=device)
        metrics = learner.train_step(make_batch(), 1)
        if device.peak_flops() is None:
            assert "perf/mfu/actor" not in metrics
        else:
            seconds = metrics["timing_s/update_actor"]
            share = update_flops(shape, make_batch(), ()) / (seconds * PEAK)
            assert metrics["perf/mfu/actor"] == pytest.approx(share)
