"""Ranks and micro-batches that keep every prompt's rows together, as losses over groups need.

The counterpart of `sluice.algorithm.packing` for ADPO: there a heavy group may be split between
ranks and micro-batches, here never.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.algorithm.karmarkar_karp import balanced_partition
from sluice.algorithm.packing import (
    GroupPiece,
    MicroBatchPlan,
    RowSize,
    piece_tokens,
    piece_workload,
    whole_groups,
)
from sluice.errors import ConfigError


def assign_groups_to_ranks(rows: Sequence[RowSize], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Give each rank whole groups, of nearly equal cost.

    Args:
        rows: all rows of a mini-batch.
        num_ranks: data-parallel size, >= 1.

    Returns:
        per rank the ascending row indices; ranks beyond the number of groups have none.

    Raises:
        ConfigError: `num_ranks` < 1.
    """
    if num_ranks < 1:
        raise ConfigError(f"groups cannot be spread over {num_ranks} ranks; need at least one")
    pieces = whole_groups(rows, range(len(rows)))
    costs = [piece_workload(rows, piece) for piece in pieces]
    shares = balanced_partition(costs, num_ranks, equal_size=False)
    return tuple(
        tuple(sorted(row for i in share for row in pieces[i].row_indices)) for share in shares
    )


def plan_whole_group_micro_batches(
    rows: Sequence[RowSize],
    row_indices: Sequence[int],
    *,
    token_budget: int | None = None,
    rows_per_micro: int | None = None,
) -> tuple[MicroBatchPlan, ...]:
    """Pack one rank's groups into micro-batches; no group is ever split.

    By budget, groups go largest first into the fullest micro-batch with room for all of their
    rows; a group longer than the budget gets a micro-batch of its own, which then exceeds it. By
    rows, consecutive groups share a micro-batch. Micro-batches come largest first.

    Args:
        rows: all rows of the mini-batch.
        row_indices: this rank's share, from `assign_groups_to_ranks`.
        token_budget: tokens of a micro-batch, each group's prompt counted once.
        rows_per_micro: rows of a micro-batch instead, a multiple of every group's.

    Raises:
        ConfigError: not exactly one limit is given, it is < 1, or `rows_per_micro` is no multiple
            of a group's rows.
    """
    limit = token_budget if rows_per_micro is None else rows_per_micro
    if (token_budget is None) == (rows_per_micro is None) or limit is None or limit < 1:
        raise ConfigError(
            f"micro-batches of whole groups need either a token budget >= 1, got {token_budget}, "
            f"or a number of rows >= 1, got {rows_per_micro}, not both"
        )
    groups = whole_groups(rows, row_indices)
    if token_budget is None:
        _check_rows_per_micro(groups, limit)
        batches = _in_runs(groups, limit)
    else:
        batches = _best_fit(rows, groups, limit)
    plans = [MicroBatchPlan(tuple(batch), _tokens(rows, batch)) for batch in batches]
    return tuple(sorted(plans, key=lambda plan: (-plan.num_tokens, plan.row_indices)))


def _check_rows_per_micro(groups: Sequence[GroupPiece], rows_per_micro: int) -> None:
    for piece in groups:
        if rows_per_micro % len(piece.row_indices):
            raise ConfigError(
                f"actor.ppo_micro_batch_size_per_gpu={rows_per_micro} is no multiple of the "
                f"{len(piece.row_indices)} rows of a prompt (rollout.n), which ADPO needs in one "
                "micro-batch; make it one, or set use_dynamic_bsz=true"
            )


def _in_runs(groups: Sequence[GroupPiece], rows_per_micro: int) -> list[list[GroupPiece]]:
    batches: list[list[GroupPiece]] = []
    capacity = 0
    for piece in groups:
        if capacity < len(piece.row_indices):
            batches.append([])
            capacity = rows_per_micro
        batches[-1].append(piece)
        capacity -= len(piece.row_indices)
    return batches


def _best_fit(
    rows: Sequence[RowSize], groups: Sequence[GroupPiece], budget: int
) -> list[list[GroupPiece]]:
    batches: list[list[GroupPiece]] = []
    for piece in sorted(groups, key=lambda group: -piece_tokens(rows, group)):
        size = piece_tokens(rows, piece)
        fitting = [batch for batch in batches if _tokens(rows, batch) + size <= budget]
        if fitting:
            max(fitting, key=lambda batch: _tokens(rows, batch)).append(piece)
        else:
            batches.append([piece])
    return batches


def _tokens(rows: Sequence[RowSize], pieces: Sequence[GroupPiece]) -> int:
    return sum(piece_tokens(rows, piece) for piece in pieces)
