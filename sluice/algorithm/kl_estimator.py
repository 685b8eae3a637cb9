"""Estimators of the KL divergence from one sample a token (Schulman 2020, "Approximating KL
divergence": k1, k2, k3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.errors import ConfigError

if TYPE_CHECKING:
    import torch


KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token sampled from the policy.

    With ``x = logprobs - ref_logprobs``: ``kl``, ``k1``: x; ``abs``: |x|; ``mse``, ``k2``:
    x^2 / 2; ``low_var_kl``, ``k3``: ``exp(-x) + x - 1`` with x within +-20 and the result within
    +-10. A ``+`` behind the name keeps the value and takes the gradient of k2, whose expectation
    is the gradient of the divergence (straight-through).

    Args:
        logprobs: float, any shape; carries the gradient.
        ref_logprobs: float of the same shape.
        kind: one of the names, with or without ``+``.

    Raises:
        ConfigError: unknown kind, or ``full``, which needs whole distributions.
    """
    name = kind.removesuffix("+")
    if name not in KL_ESTIMATORS:
        raise ConfigError(_refusal(kind))
    difference = logprobs - ref_logprobs
    value = _value(difference, name)
    if name == kind:
        return value
    k2 = 0.5 * difference.square()
    return k2 - k2.detach() + value.detach()


def _value(difference: torch.Tensor, name: str) -> torch.Tensor:
    if name in {"kl", "k1"}:
        return difference
    if name == "abs":
        return difference.abs()
    if name in {"mse", "k2"}:
        return 0.5 * difference.square()
    bounded = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (bounded.exp() - bounded - 1.0).clamp(-MAX_K3, MAX_K3)


def _refusal(kind: str) -> str:
    known = f"known: {', '.join(KL_ESTIMATORS)}, each also with + behind it"
    if kind.removesuffix("+") == "full":
        return (
            f"kl_penalty, kl_loss_type: '{kind}' needs the probabilities of the whole vocabulary, "
            f"which are not kept; {known}"
        )
    return f"kl_penalty, kl_loss_type: unknown value '{kind}'; {known}"
