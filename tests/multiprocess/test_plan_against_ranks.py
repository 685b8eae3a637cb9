"""What a plan counts for a rank without memory is what a real rank of a gloo group holds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plan_parity import DENSE, EXPERTS, counted_and_planned


@pytest.mark.parametrize(
    ("ranks", "recompute", "sharding"),
    [
        (2, False, {}),
        (4, True, {"ulysses_sequence_parallel_size": 2}),
        (4, False, {"fsdp_size": 2, "ulysses_sequence_parallel_size": 4}),
        (2, False, {"fsdp_size": 1, "dtype": "float32"}),
    ],
)
def test_a_plan_counts_the_bytes_and_the_collectives_of_a_real_rank(
    ranks: int, recompute: bool, sharding: dict[str, Any]
) -> None:
    real, planned = counted_and_planned(DENSE, ranks, recompute=recompute, **sharding)
    assert planned == real
    assert real["backward"] > real["kept"] > 0
    assert ("all_to_all" in real["moved"]) == ("ulysses_sequence_parallel_size" in sharding)


@pytest.mark.parametrize(
    ("recompute", "sharding"),
    [
        (False, {"expert_parallel_size": 4}),
        (True, {"expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2}),
    ],
)
def test_a_plan_counts_experts_that_ranks_divide(recompute: bool, sharding: dict[str, Any]) -> None:
    real, planned = counted_and_planned(EXPERTS, 4, recompute=recompute, **sharding)
    assert planned == real
    assert real["moved"]["all_to_all"] > 0
