"""Published verl launches break no rule of batch sizes, parallel sizes or engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.loading.loader import KeySettings, keys_as_set, load_config
from sluice.config.rules.checks import all_problems
from sluice.config.verl_run import verl_batch
from tests.support.published_shapes import PUBLISHED_SHAPES

LAUNCHES = Path(__file__).parents[2] / "data" / "launches"
DATA_PARALLEL = {
    "adpo-4x4090": 4,
    "dapo-qwen3-235b-megatron": 4,
    "dapo-qwen3-32b-fsdp2-npu": 16,
    "dapo-qwen3-8b-dianjin-npu": 16,
    "dapo-qwen3-vl-30b-fsdp2-npu": 16,
    "grpo-8xa100": 8,
    "grpo-qwen2.5-7b-megatron-kl": 2,
}


def test_every_launch_is_looked_at() -> None:
    assert {file.stem for file in LAUNCHES.glob("*.overrides")} == set(DATA_PARALLEL)


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_a_published_launch_breaks_no_rule(name: str) -> None:
    file = LAUNCHES / f"{name}.overrides"
    config = load_config(file, [])
    settings = KeySettings(config, keys_as_set(file, []))
    model = config.actor_rollout_ref.model.path.rpartition("/")[2]
    shape = PUBLISHED_SHAPES.get(model.removesuffix("-Instruct").replace("-VL", ""))
    assert (shape is None) == (not model)
    broken = all_problems(config, settings, shape=shape, files=False)
    assert [one for one in broken if one.rule != "engine-replicas"] == []
    assert verl_batch(config, settings).split.data_parallel == DATA_PARALLEL[name]
