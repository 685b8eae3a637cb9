"""Policy losses by plain loops in float64, written from the papers; padded layout.

`at` holds the logprobs to differentiate, `frozen` those inside stop-gradients; both are the same
numbers where a value is wanted. Finite differences in `at` alone then give the true gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
LOW, HIGH, C = 0.2, 0.28, 3.0
TAU_POS, TAU_NEG, DRO_BETA = 1.0, 1.05, 0.7
COV_LOW, COV_HIGH, KL_COV_RATIO, KL_COEF = 0.05, 0.6, 0.1, 0.1
METRICS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")


@dataclass(frozen=True)
class Padded:
    """Tokens [rows, width]; the mask has gaps and an empty row."""

    logprobs: Matrix
    old: Matrix
    advantages: Matrix
    mask: npt.NDArray[np.bool_]
    weights: Matrix

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Positions that count."""
        return [(int(i), int(t)) for i, t in np.argwhere(self.mask)]

    def row(self, i: int) -> list[int]:
        """Columns of row i that count."""
        return [int(t) for t in np.flatnonzero(self.mask[i])]


def random_batch(seed: int, spread: float, rows: int = 6, width: int = 7) -> Padded:
    """Row-wise advantages, log-ratios of standard deviation `spread`; exact in float32."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.7
    mask[1], mask[2, 0], mask[0] = False, True, True
    old = -rng.exponential(1.2, (rows, width)) - 0.02
    new = np.minimum(old + spread * rng.standard_normal((rows, width)), -0.01)
    advantages = np.repeat(rng.standard_normal((rows, 1)), width, axis=1)
    weights = rng.uniform(0.2, 2.0, (rows, width))
    new, old, advantages, weights = (
        x.astype(np.float32).astype(np.float64) for x in (new, old, advantages, weights)
    )
    return Padded(new, old, advantages, mask, weights)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(a: float, ratio: float) -> float:
    return -min(a * ratio, a * clip(ratio, 1 - LOW, 1 + HIGH))


def vanilla(at: float, frozen: float, old: float, a: float) -> float:
    loss = ppo(a, exp(clip(at - old, -20, 20)))
    return min(loss, -a * C) if a < 0 else loss


def _dppo(at: float, frozen: float, old: float, a: float, valid: bool) -> float:
    return -a * min(exp(clip(frozen - old, -20, 20)), C) * at if valid else 0.0


def tv_valid(new: float, old: float, a: float) -> bool:
    gap = exp(new) - exp(old)
    return gap <= HIGH if a > 0 else gap >= -LOW


def kl_valid(new: float, old: float, a: float) -> bool:
    p, q = exp(new), exp(old)
    kl = q * (old - new) + (1 - q) * log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (kl <= HIGH or p <= q) if a > 0 else (kl <= LOW or p >= q)


def dppo_tv(at: float, frozen: float, old: float, a: float) -> float:
    return _dppo(at, frozen, old, a, tv_valid(frozen, old, a))


def dppo_kl(at: float, frozen: float, old: float, a: float) -> float:
    return _dppo(at, frozen, old, a, kl_valid(frozen, old, a))


def sapo(at: float, frozen: float, old: float, a: float) -> float:
    tau = TAU_POS if a > 0 else TAU_NEG
    x = tau * (exp(clip(at - old, -20, 20)) - 1)
    sigmoid = 1 / (1 + exp(-x)) if x > -700 else 0.0
    return -a * sigmoid * 4 / tau


def gpg(at: float, frozen: float, old: float, a: float) -> float:
    return -a * at


def dro(at: float, frozen: float, old: float, a: float) -> float:
    return -(at * a - DRO_BETA / 2 * (at - old) ** 2)


def cispo(at: float, frozen: float, old: float, a: float) -> float:
    return -clip(exp(clip(frozen - old, -20, 20)), 1 - LOW, 1 + HIGH) * a * at


TOKEN_FORMULAS: dict[str, Callable[[float, float, float, float], float]] = {
    "vanilla": vanilla,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
    "gpg": gpg,
    "dro": dro,
    "cispo": cispo,
}


def covariances(b: Padded, new: Matrix) -> dict[tuple[int, int], float]:
    mean_a = sum(b.advantages[p] for p in b.tokens) / len(b.tokens)
    mean_p = sum(new[p] for p in b.tokens) / len(b.tokens)
    return {p: (b.advantages[p] - mean_a) * (new[p] - mean_p) for p in b.tokens}


def cut_by_covariance(b: Padded, new: Matrix) -> set[tuple[int, int]]:
    """All candidates of clip_cov."""
    cut = set()
    for p, cov in covariances(b, new).items():
        a, ratio = b.advantages[p], exp(new[p] - b.old[p])
        clipped = -a * clip(ratio, 1 - LOW, 1 + HIGH) > -a * ratio
        if COV_LOW < cov < COV_HIGH and not clipped:
            cut.add(p)
    return cut


def token_losses(name: str, b: Padded, at: Matrix, frozen: Matrix) -> Matrix:
    """Loss of every token, 0 outside the mask; not weighted."""
    loss = np.zeros_like(at)
    if name in TOKEN_FORMULAS:
        for p in b.tokens:
            loss[p] = TOKEN_FORMULAS[name](at[p], frozen[p], b.old[p], b.advantages[p])
    elif name == "gspo":
        for i, t in b.tokens:
            row = b.row(i)
            mean = sum(frozen[i, s] - b.old[i, s] for s in row) / len(row)
            ratio = exp(min(at[i, t] - frozen[i, t] + mean, 10.0))
            loss[i, t] = ppo(b.advantages[i, t], ratio)
    elif name == "clip_cov":
        cut = cut_by_covariance(b, frozen)
        for p in set(b.tokens) - cut:
            loss[p] = ppo(b.advantages[p], exp(at[p] - b.old[p]))
    else:
        cov = covariances(b, frozen)
        worst = sorted(cov, key=lambda p: -cov[p])[: max(1, int(KL_COV_RATIO * len(cov)))]
        for p in b.tokens:
            d = at[p] - b.old[p]
            loss[p] = -b.advantages[p] * exp(d) + KL_COEF * abs(d) * (p in worst)
    return loss


def geo_mean(b: Padded, at: Matrix, *, weighted: bool) -> float:
    total = 0.0
    for i in range(len(at)):
        row = b.row(i)
        if not row:
            continue
        a = sum(b.advantages[i, t] for t in row) / len(row)
        logs = 0.0
        for t in row:
            d = at[i, t] - b.old[i, t]
            # The clip acts only where it makes the objective worse.
            logs += min(d, clip(d, -LOW, HIGH)) if a > 0 else max(d, clip(d, -LOW, HIGH))
        weight = exp(sum(log(b.weights[i, t] + 1e-10) for t in row) / len(row)) if weighted else 1
        total += -a * exp(logs / len(row)) * weight
    return total / len(at)


def aggregate(loss: Matrix, b: Padded, mode: str, factor: float) -> float:
    rows = len(loss)
    if mode == "token-mean":
        return sum(loss[p] for p in b.tokens) / len(b.tokens)
    if mode == "token-sum":
        return sum(loss[p] for p in b.tokens)
    sums = [sum(loss[i, t] for t in b.row(i)) for i in range(rows)]
    if mode == "seq-mean-token-mean":
        return sum(s / max(len(b.row(i)), 1) for i, s in enumerate(sums)) / rows
    return sum(sums) / rows / (factor if mode == "seq-mean-token-sum-norm" else 1)


def objective(
    name: str, b: Padded, at: Matrix, frozen: Matrix, mode: str, *, weighted: bool, factor: float
) -> float:
    """The loss of the whole batch."""
    if name == "geo_mean":
        return geo_mean(b, at, weighted=weighted)
    loss = token_losses(name, b, at, frozen) * (b.weights if weighted else 1.0)
    overriding = name in ("gspo", "sapo")
    return aggregate(loss, b, "seq-mean-token-mean" if overriding else mode, factor)


def gradient(
    name: str, b: Padded, mode: str, *, weighted: bool, factor: float, step: float = 1e-6
) -> Matrix:
    """Central finite differences in every token, stop-gradients held."""
    slope = np.zeros_like(b.logprobs)
    for p in b.tokens:
        ends = []
        for sign in (1, -1):
            at = b.logprobs.copy()
            at[p] += sign * step
            ends.append(objective(name, b, at, b.logprobs, mode, weighted=weighted, factor=factor))
        slope[p] = (ends[0] - ends[1]) / (2 * step)
    return slope
