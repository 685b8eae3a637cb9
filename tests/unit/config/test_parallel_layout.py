"""The sizes of a trainer's layout: what they mean, in which words, and what does not divide."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.parallel_layout import (
    ParallelLayout,
    check_experts,
    sequence_sizes,
    shard_size,
    trainer_layout,
)
from sluice.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
FSDP, MEGATRON, VEOMNI = f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron", f"{ACTOR}.veomni"
TORCHTITAN = f"{ACTOR}.torchtitan"


def layout(*overrides: str, ranks: int = 16) -> ParallelLayout:
    return trainer_layout(load_config(None, overrides), ranks)


def test_all_ranks_share_one_copy_by_default() -> None:
    found = layout()
    assert found == ParallelLayout(ranks=16, shard=16, sequence=1, experts=1)
    assert found.data_ranks == 16


def test_ranks_that_share_sequences_train_the_same_rows() -> None:
    assert ParallelLayout(ranks=16, shard=8, sequence=4, experts=2).data_ranks == 4


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (f"{ACTOR}.ulysses_sequence_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size"),
        (f"+{MEGATRON}.context_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size"),
        (f"{VEOMNI}.ulysses_parallel_size", f"{FSDP}.ulysses_sequence_parallel_size"),
        (f"{MEGATRON}.expert_model_parallel_size", f"{FSDP}.expert_parallel_size"),
        (f"{VEOMNI}.expert_parallel_size", f"{FSDP}.expert_parallel_size"),
        (f"{MEGATRON}.tensor_model_parallel_size", f"{FSDP}.tensor_parallel_size"),
        (f"{TORCHTITAN}.tensor_parallel_size", f"{FSDP}.tensor_parallel_size"),
        (f"{MEGATRON}.pipeline_model_parallel_size", f"{FSDP}.pipeline_parallel_size"),
        (f"{VEOMNI}.fsdp_size", f"{FSDP}.fsdp_size"),
        (f"{TORCHTITAN}.data_parallel_shard_size", f"{FSDP}.fsdp_size"),
        (f"{TORCHTITAN}.expert_parallel_size", f"{FSDP}.expert_parallel_size"),
    ],
)
def test_a_size_of_another_backend_of_verl_is_the_same_size_here(words: str, same: str) -> None:
    assert layout(f"{words}=4") == layout(f"{same}=4")
    assert layout(f"{words}=4") != layout()


def test_two_words_for_one_size_must_agree() -> None:
    pair = f"{MEGATRON}.context_parallel_size=2", f"{FSDP}.ulysses_sequence_parallel_size=4"
    both = r"fsdp_config.ulysses_seq\S+ = 4 and .*megatron.context_parallel_size = 2 are one size"
    with pytest.raises(ConfigError, match=both):
        load_config(None, pair)
    assert layout(pair[0], f"{FSDP}.ulysses_sequence_parallel_size=2").sequence == 2


def test_a_stage_and_a_tensor_index_leave_the_ranks_that_share_a_copy() -> None:
    found = layout(f"{FSDP}.tensor_parallel_size=2", f"{FSDP}.pipeline_parallel_size=4")
    assert (found.peers, found.shard, found.data_ranks) == (2, 2, 2)
    cut = ParallelLayout(ranks=16, shard=4, sequence=2, experts=8, tensor=2, pipeline=2)
    assert (cut.peers, cut.data_ranks) == (4, 2)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (f"{FSDP}.fsdp_size=3", "fsdp_size=3 does not divide the 16 trainer ranks .*; give 2 or 4"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=5", "=5 does not divide the 16 .*; give 4 or 8"),
        (f"{FSDP}.expert_parallel_size=32", "=32 does not divide the 16 ranks .*; give 16"),
        (f"{FSDP}.tensor_parallel_size=3", "=3 does not divide the 16 trainer .*; give 2 or 4"),
        (f"{FSDP}.pipeline_parallel_size=32", "=32 does not divide the 16 trainer .*; give 16"),
    ],
)
def test_a_size_that_does_not_divide_names_the_nearest_that_do(override: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        layout(override)


def test_sizes_divide_what_tensor_and_pipeline_sizes_leave() -> None:
    cuts = f"{FSDP}.tensor_parallel_size=4", f"{FSDP}.pipeline_parallel_size=2"
    left = "=4 does not divide the 2 trainer ranks that tensor and pipeline sizes leave; give 2"
    with pytest.raises(ConfigError, match=left):
        layout(*cuts, f"{FSDP}.ulysses_sequence_parallel_size=4")
    with pytest.raises(ConfigError, match=r"fsdp_size=3 does not divide the 4 .* sizes leave"):
        layout(cuts[0], f"{FSDP}.fsdp_size=3")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 does .* the 2 .* of a stage"):
        layout(f"{FSDP}.tensor_parallel_size=4", f"{FSDP}.pipeline_parallel_size=8")
    assert layout(*cuts, f"{FSDP}.expert_parallel_size=8").experts == 8


def test_experts_divide_within_one_copy() -> None:
    with pytest.raises(ConfigError, match=r"=8 does not divide the 4 ranks that share one copy"):
        layout(f"{FSDP}.fsdp_size=4", f"{FSDP}.expert_parallel_size=8")


def test_experts_that_ranks_cannot_divide_are_named() -> None:
    check_experts(8, 128, "qwen3_moe")
    with pytest.raises(ConfigError, match=r"=6 does not divide the 128 experts .*give 4 or 8"):
        check_experts(6, 128, "qwen3_moe")
    with pytest.raises(ConfigError, match="a llama model has no experts; leave the key at 1"):
        check_experts(2, 0, "llama")


@pytest.mark.parametrize(
    ("fsdp_size", "ranks", "expected"),
    [(-1, 4, 4), (0, 4, 4), (1, 4, 1), (2, 4, 2), (4, 4, 4), (16, 4, 4), (-1, 1, 1)],
)
def test_ranks_share_by_fsdp_size(fsdp_size: int, ranks: int, expected: int) -> None:
    assert shard_size(fsdp_size, ranks, ranks, "fsdp_size") == expected


def test_a_size_that_does_not_divide_names_its_own_key() -> None:
    with pytest.raises(ConfigError, match=r"critic\.fsdp\.fsdp_size=3 does not divide the 4"):
        shard_size(3, 4, 4, "critic.fsdp.fsdp_size")


def test_few_key_value_heads_are_repeated_over_ranks() -> None:
    assert sequence_sizes(heads=12, kv_heads=2) == [1, 2, 4, 6, 12]
