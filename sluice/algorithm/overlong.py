"""Soft overlong punishment (DAPO §3.4, equation 13; verl's overlong_buffer)."""

from __future__ import annotations

from sluice.errors import ConfigError


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

    Raises:
        ConfigError: ``0 < buffer_tokens <= max_response_tokens`` does not hold, or the factor is
            negative.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ConfigError(
            f"overlong_buffer.len must lie in 1..{max_response_tokens} (max_response_length), "
            f"got {buffer_tokens}; change it or set overlong_buffer.enable=false"
        )
    if penalty_factor < 0:
        raise ConfigError(f"overlong_buffer.penalty_factor must be >= 0, got {penalty_factor}")
    exceeding_tokens = num_response_tokens - (max_response_tokens - buffer_tokens)
    return -max(exceeding_tokens, 0) / buffer_tokens * penalty_factor
