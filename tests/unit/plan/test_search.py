"""Changes of a search: each is possible, has an effect, and is offered alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sluice.config.device_split import DeviceSplit
from sluice.config.loading.loader import load_config
from sluice.config.memory.shape import published_shape
from sluice.config.run import RunConfig
from sluice.plan.search import engine_change, trainer_changes

FSDP, ROLLOUT = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.rollout"
SPLIT = DeviceSplit(8, 8, 1, 1)


def changes(
    *overrides: str, model: str = "Qwen3-8B", own_experts: bool = True
) -> Sequence[tuple[str, ...]]:
    config = load_config(None, overrides)
    shape = replace(published_shape(model), adaptable_experts=own_experts)
    found = trainer_changes(config, shape, SPLIT, [SPLIT])
    return [change.overrides for change in found]


def engine(model: str, tp: int, *overrides: str) -> tuple[str, ...] | None:
    """The change after which an engine of `tp` devices or more fits."""
    config = load_config(None, [f"{ROLLOUT}.name=vllm", *overrides])

    def holds(one: RunConfig) -> bool:
        return one.actor_rollout_ref.rollout.tensor_model_parallel_size >= tp

    found = engine_change(config, published_shape(model), holds, is_split=True)
    return None if found is None else found.overrides


def test_a_part_of_what_shards_a_copy_is_enough() -> None:
    found = changes(f"{FSDP}.fsdp_size=2", f"{FSDP}.reshard_after_forward=false")
    assert (f"{FSDP}.fsdp_size=-1",) in found
    assert (f"{FSDP}.reshard_after_forward=true",) in found
    assert (f"{FSDP}.fsdp_size=-1", f"{FSDP}.reshard_after_forward=true") in found


def test_an_engine_has_devices_that_divide_its_heads() -> None:
    assert engine("Qwen2.5-7B", 4) == (f"{ROLLOUT}.tensor_model_parallel_size=4",)
    assert engine("Qwen2.5-7B", 8) is None  # 28 heads
    assert engine("Qwen2.5-7B", 2, f"{ROLLOUT}.name=torch") is None


def test_an_engine_that_divides_its_experts_divides_them_still() -> None:
    both = (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2")
    assert engine("Qwen3-30B-A3B", 4, *both) == (
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.expert_parallel_size=4",
    )


def test_ranks_are_offered_experts_only_of_a_family_that_the_trainer_divides() -> None:
    divided = (f"{FSDP}.expert_parallel_size=2",)
    assert divided in changes(model="Qwen3-30B-A3B")
    assert divided not in changes(model="Qwen3-30B-A3B", own_experts=False)
