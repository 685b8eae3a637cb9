"""Soft overlong punishment (DAPO §3.4, equation 13; verl's overlong_buffer)."""

from __future__ import annotations


def overlong_penalty(
    num_response_tokens: int,
    *,
    max_response_tokens: int,
    buffer_tokens: int,
    penalty_factor: float,
) -> float:
    """Return what to add to a score because the response runs into the buffer before the limit.

    0 up to ``max_response_tokens - buffer_tokens``, then falling linearly to ``-penalty_factor``
    at ``max_response_tokens`` (and on, for a longer response).

    Args:
        num_response_tokens: response length, the stop token included.
        max_response_tokens: the hard limit of generation.
        buffer_tokens: width of the soft zone that ends at the limit.
        penalty_factor: penalty at the limit, >= 0.
    """
    exceeding_tokens = num_response_tokens - (max_response_tokens - buffer_tokens)
    return -max(exceeding_tokens, 0) / buffer_tokens * penalty_factor
