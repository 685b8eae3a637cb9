"""Metrics of the policy losses by plain loops in float64; padded layout."""

from __future__ import annotations

from math import exp

import numpy as np

from tests.parity import policy_loss_formulas as formulas
from tests.parity.policy_loss_formulas import HIGH, LOW, C, Padded, clip

CLIPPED, HELD, KL = formulas.METRICS
BOUNDED_KL = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo")


def metrics(name: str, b: Padded) -> dict[str, float]:
    """Token means by metric name: exactly those that the loss reports."""
    if name == "gpg":
        return {}
    d = {p: float(b.logprobs[p] - b.old[p]) for p in b.tokens}
    if name == "kl_cov":
        return {KL: _mean(abs(x) for x in d.values())}
    bounded = name in BOUNDED_KL
    found = {KL: _mean(-clip(x, -20, 20) if bounded else -x for x in d.values())}
    if name == "dro":
        return found
    found[CLIPPED] = _mean(_is_clipped(name, b, p) for p in b.tokens)
    if name != "clip_cov":
        found[HELD] = _mean(_is_held(name, b, p) for p in b.tokens)
    return found


def _is_clipped(name: str, b: Padded, p: tuple[int, int]) -> bool:
    a, d = b.advantages[p], b.logprobs[p] - b.old[p]
    ratio = exp(clip(d, -20, 20))
    if name == "gspo":
        row = b.row(p[0])
        ratio = exp(min(sum(b.logprobs[p[0], t] - b.old[p[0], t] for t in row) / len(row), 10))
    if name in ("vanilla", "gspo"):
        return bool(a > 0 and ratio > 1 + HIGH) or bool(a < 0 and ratio < 1 - LOW)
    if name == "dppo_tv":
        return not formulas.tv_valid(b.logprobs[p], b.old[p], a)
    if name == "dppo_kl":
        return not formulas.kl_valid(b.logprobs[p], b.old[p], a)
    if name == "cispo":
        return not 1 - LOW <= ratio <= 1 + HIGH
    if name == "clip_cov":
        return p in formulas.cut_by_covariance(b, b.logprobs)
    return bool(name == "geo_mean" and a > 0 and not -LOW <= d <= HIGH)


def _is_held(name: str, b: Padded, p: tuple[int, int]) -> bool:
    a, d = b.advantages[p], b.logprobs[p] - b.old[p]
    ratio = exp(clip(d, -20, 20))
    if name == "vanilla":
        return bool(a < 0 and ratio > C)
    if name in ("dppo_tv", "dppo_kl"):
        return ratio > C and not _is_clipped(name, b, p)
    return bool(name == "geo_mean" and a < 0 and not -LOW <= d <= HIGH)


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]
