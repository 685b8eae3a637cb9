"""Turn per-token losses into the scalar to differentiate (verl's loss_agg_mode).

Tokens are flat: a tensor [tokens] of all response tokens of a micro-batch without padding, and
`row_index` [tokens], which says whose they are. Denominators are global, that is counted over all
micro-batches and ranks of the mini-batch: the **sum** of the returned scalars over micro-batches
and ranks is the mini-batch's loss, however it was cut. With `averaged_ranks` D it is the mean over
D ranks of their sums over micro-batches, as a backend needs that averages gradients.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from sluice.errors import ConfigError


class LossAggregation(StrEnum):
    """How tokens and rows are weighted against each other."""

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"


def aggregate(
    loss: torch.Tensor,
    row_index: torch.Tensor,
    *,
    mode: str,
    global_tokens: float,
    global_rows: float,
    loss_scale_factor: float | None = None,
    averaged_ranks: int = 1,
) -> torch.Tensor:
    """This micro-batch's share of the mini-batch's loss.

    With sums over the given tokens, T `global_tokens`, S `global_rows` and length(row) the number
    of tokens of a row: ``token-mean`` sum / T (DAPO §3.3); ``token-sum`` sum;
    ``seq-mean-token-sum`` sum / S; ``seq-mean-token-sum-norm`` sum / S / `loss_scale_factor`
    (Dr.GRPO); ``seq-mean-token-mean`` sum(loss / length(row)) / S (GRPO). Rows without tokens add
    nothing but count in S.

    Args:
        loss: float [tokens].
        row_index: int64 [tokens], values >= 0; all tokens of a row are in the same call.
        mode: a `LossAggregation`.
        global_tokens: T.
        global_rows: S.
        loss_scale_factor: divisor of ``seq-mean-token-sum-norm``, by verl's default the response
            limit in tokens.
        averaged_ranks: D where the backend averages gradients over D ranks, 1 where it sums them.

    Returns:
        scalar (0-d) in float32, or float64 for such a loss; 0 for no tokens.

    Raises:
        ConfigError: unknown mode, or no scale factor where the mode needs one.
    """
    if mode not in set(LossAggregation):
        raise ConfigError(
            f"actor.loss_agg_mode: unknown value '{mode}'; known: {', '.join(LossAggregation)}"
        )
    needs_factor = mode == LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM
    if needs_factor and (loss_scale_factor is None or loss_scale_factor <= 0):
        raise ConfigError(
            f"actor.loss_scale_factor must be positive with loss_agg_mode={mode}, got "
            f"{loss_scale_factor}; data.max_response_length is verl's default"
        )
    values = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if mode == LossAggregation.SEQ_MEAN_TOKEN_MEAN:
        values = values / _row_lengths(row_index)
    divisors = {
        LossAggregation.TOKEN_MEAN: global_tokens,
        LossAggregation.TOKEN_SUM: 1.0,
        LossAggregation.SEQ_MEAN_TOKEN_SUM: global_rows,
        LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM: global_rows * (loss_scale_factor or 1.0),
        LossAggregation.SEQ_MEAN_TOKEN_MEAN: global_rows,
    }
    share = values.sum() / divisors[LossAggregation(mode)]
    return share if averaged_ranks == 1 else share * averaged_ranks


def _row_lengths(row_index: torch.Tensor) -> torch.Tensor:
    """Length of each token's row, int64 [tokens]."""
    return torch.bincount(row_index)[row_index]
