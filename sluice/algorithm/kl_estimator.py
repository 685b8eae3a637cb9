"""Estimators of the KL divergence from one sample a token (Schulman 2020, "Approximating KL
divergence": k1, k2, k3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def _difference(x: torch.Tensor) -> torch.Tensor:
    return x


def _half_square(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x.square()


def _low_variance(x: torch.Tensor) -> torch.Tensor:
    bounded = (-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (bounded.exp() - bounded - 1.0).clamp(-MAX_K3, MAX_K3)


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": _difference,
    "k1": _difference,
    "abs": torch.abs,
    "mse": _half_square,
    "k2": _half_square,
    "low_var_kl": _low_variance,
    "k3": _low_variance,
}
"""By verl's names, of the difference of the logprobs. ``full`` is none of them: it needs the
probabilities of the whole vocabulary, which are not kept.
"""


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy.

    With ``x = logprobs - ref_logprobs``: ``kl``, ``k1``: x; ``abs``: |x|; ``mse``, ``k2``:
    x^2 / 2; ``low_var_kl``, ``k3``: ``exp(-x) + x - 1`` with x within +-20 and the result within
    +-10. A ``+`` behind the name keeps the value and takes the gradient of k2, whose expectation
    is the gradient of the divergence (straight-through).

    Args:
        logprobs: float, any shape; carries the gradient.
        ref_logprobs: float of the same shape.
        kind: one of `KL_ESTIMATORS`, with or without ``+``.
    """
    name = kind.removesuffix("+")
    difference = logprobs - ref_logprobs
    value = KL_ESTIMATORS[name](difference)
    if name == kind:
        return value
    k2 = _half_square(difference)
    return k2 - k2.detach() + value.detach()
