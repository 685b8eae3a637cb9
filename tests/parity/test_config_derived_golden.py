"""Numbers derived from batch sizes against verl's worked cases and independent formulas."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config.verl_sizes import BatchPlan, ParallelSplit

S4 = ParallelSplit(1, 4)
CASES = {
    # name: (plan, rows, D, mini-batch rows per rank, accumulation steps, optimizer steps)
    "ADPO on 4 GPUs": (BatchPlan(64, 32, 8, 1, 64, 8, S4), 512, 4, 64, 8, 2),
    "GRPO on 8 GPUs": (BatchPlan(256, 128, 8, 1, 256, 16, ParallelSplit(1, 8)), 2048, 8, 128, 8, 2),
    "the guide's table": (BatchPlan(128, 64, 8, 1, 128, 8, S4), 1024, 4, 128, 16, 2),
    "DAPO 32B, sp 4, dynamic": (
        BatchPlan(64, 32, 16, 1, 64, None, ParallelSplit(4, 16, sp=4)),
        1024,
        16,
        32,
        None,
        2,
    ),
    "DAPO 8B, filtered": (
        BatchPlan(128, 32, 8, 1, 256, 2, ParallelSplit(1, 16)),
        1024,
        16,
        16,
        8,
        4,
    ),
    "GRPO 7B, TP2 PP2": (
        BatchPlan(32, 16, 3, 1, 32, 1, ParallelSplit(1, 8, megatron=True, tp=2, pp=2)),
        96,
        2,
        24,
        24,
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_worked_cases_come_out_as_verl_has_them(name: str) -> None:
    plan, *expected = CASES[name]
    assert [
        plan.rows,
        plan.split.data_parallel,
        plan.mini_rows_per_data_rank,
        plan.accumulation_steps,
        plan.optimizer_steps,
    ] == expected


def test_a_generation_round_counts_its_own_prompts() -> None:
    plan, *_ = CASES["DAPO 8B, filtered"]
    assert (plan.gen_rows, plan.steps_per_epoch(1000)) == (2048, 3)


@given(
    prompts=st.integers(1, 500),
    mini=st.integers(1, 500),
    n=st.integers(1, 64),
    epochs=st.integers(1, 4),
    micro=st.integers(1, 64),
    machines=st.tuples(st.integers(1, 8), st.integers(1, 16)),
    cut=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2)),
    megatron=st.booleans(),
)
def test_every_quotient_is_exact_or_absent(
    prompts: int,
    mini: int,
    n: int,
    epochs: int,
    micro: int,
    machines: tuple[int, int],
    cut: tuple[int, int, int],
    megatron: bool,
) -> None:
    (nodes, ranks), (tp, pp, cp) = machines, cut
    split = ParallelSplit(nodes, ranks, megatron=megatron, sp=tp, tp=tp, pp=pp, cp=cp)
    plan = BatchPlan(prompts, mini, n, epochs, prompts, micro, split)
    data_ranks = Fraction(nodes * ranks, tp * pp * (cp if megatron else tp))
    steps = _whole(Fraction(prompts, mini))
    assert split.data_parallel == _whole(data_ranks)
    assert plan.optimizer_steps == (None if steps is None else steps * epochs)
    if split.data_parallel is not None:
        assert plan.rows_per_data_rank == _whole(Fraction(prompts * n) / data_ranks)
        per_rank = _whole(Fraction(mini * n) / data_ranks)
        assert plan.mini_rows_per_data_rank == per_rank
        expected = None if per_rank is None else _whole(Fraction(per_rank, micro))
        assert plan.accumulation_steps == expected


def _whole(value: Fraction) -> int | None:
    return value.numerator if value.denominator == 1 else None
