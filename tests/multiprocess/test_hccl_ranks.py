"""Trainer ranks under the backends of an NPU: Gloo for commands, a stand-in for HCCL beside it."""

from __future__ import annotations

from tests.support.trainer_ranks import end, ranks_of


def test_ranks_form_both_backends_and_send_rows_without_a_gather() -> None:
    with ranks_of("tests.support.hccl_rank", 2, {}) as ranks:
        first, second = (rank.answer() for rank in ranks)
        end(ranks)
    assert first["backends"] == second["backends"] == "cpu:gloo,npu:hccl"
    assert first["total"] == second["total"] == 3.0
    assert first["parts"] == [7.0] * 3
    assert second["parts"] == [0.0] * 3
    assert first["commands"] == second["commands"] == [[0.0], [1.0]]
