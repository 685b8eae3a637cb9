"""Advantage formulas in float64 NumPy, row by row, written from the papers for the parity tests.

All take rewards and mask [rows, width] and give (advantages, returns) of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Pair = tuple[Floats, Floats]


@dataclass(frozen=True)
class NumpyBatch:
    rewards: Floats
    mask: npt.NDArray[np.bool_]
    group: npt.NDArray[np.int64]
    values: Floats
    baselines: Floats
    logprobs: Floats
    sum_pi_squared: Floats
    weights: Floats
    components: Mapping[str, Floats]

    def groups(self) -> list[npt.NDArray[np.int64]]:
        return [np.flatnonzero(self.group == g) for g in sorted(set(self.group.tolist()))]


def random_batch(seed: int, sizes: tuple[int, ...] = (4, 1, 3, 2), width: int = 9) -> NumpyBatch:
    """Ragged rows with holes in the mask, shuffled groups of the given sizes, one empty row."""
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    lengths = rng.integers(2, width + 1, rows)
    mask = (np.arange(width) < lengths[:, None]) & (rng.random((rows, width)) < 0.8)
    mask[:, 0] = True
    mask[rng.integers(rows)] = False
    group = rng.permutation(np.repeat(np.arange(len(sizes)) * 7 - 3, sizes))
    return NumpyBatch(
        rewards=rng.normal(size=(rows, width)) * (rng.random((rows, width)) < 0.4) * mask,
        mask=mask,
        group=group.astype(np.int64),
        values=rng.normal(size=(rows, width)),
        baselines=rng.normal(size=rows),
        logprobs=-rng.exponential(size=(rows, width)),
        sum_pi_squared=rng.random((rows, width)),
        weights=rng.random((rows, width)) * 2.0,
        components={"format": rng.normal(size=rows), "accuracy": rng.normal(size=rows) * 5.0},
    )


def whiten(values: Floats, mask: npt.NDArray[np.bool_]) -> Floats:
    chosen = values[mask]
    return np.asarray((values - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8))


def broadcast(batch: NumpyBatch, scores: Floats) -> Pair:
    found = scores[:, None] * batch.mask
    return found, found


def by_group(batch: NumpyBatch, rule: Callable[[Floats, Floats], Floats], scores: Floats) -> Floats:
    """`rule` takes scores and lengths of one group."""
    found, lengths = np.zeros_like(scores), batch.mask.sum(1).astype(np.float64)
    for rows in batch.groups():
        found[rows] = rule(scores[rows], lengths[rows])
    return found


def z_score(scores: Floats, _lengths: Floats) -> Floats:
    if scores.size == 1:
        return scores / (1.0 + 1e-6)
    return np.asarray((scores - scores.mean()) / (scores.std(ddof=1) + 1e-6))


def centred(scores: Floats, _lengths: Floats) -> Floats:
    return scores if scores.size == 1 else scores - scores.mean()


def grpo(batch: NumpyBatch) -> Pair:
    return broadcast(batch, by_group(batch, z_score, batch.rewards.sum(1)))


def dr_grpo(batch: NumpyBatch) -> Pair:
    return broadcast(batch, by_group(batch, centred, batch.rewards.sum(1)))


def grpo_passk(batch: NumpyBatch) -> Pair:
    def rule(scores: Floats, _lengths: Floats) -> Floats:
        best, second = np.sort(scores)[::-1][:2]
        return np.where(scores == best, (best - second) / (scores.std(ddof=1) + 1e-6), 0.0)

    return broadcast(batch, by_group(batch, rule, batch.rewards.sum(1)))


def gdpo(batch: NumpyBatch) -> Pair:
    weights = {"format": 1.0, "accuracy": 0.25}
    total = sum(
        weights[key] * by_group(batch, z_score, scores) for key, scores in batch.components.items()
    )
    assert isinstance(total, np.ndarray)
    found = whiten(broadcast(batch, total)[0], batch.mask) * batch.mask
    return found, found


def gae(batch: NumpyBatch, gamma: float, lam: float) -> Pair:
    raw = np.zeros_like(batch.rewards)
    for row in range(raw.shape[0]):
        chosen = np.flatnonzero(batch.mask[row])
        for place in range(raw.shape[1]):
            # The advantage carried to a skipped place is that of the next chosen one.
            ahead = chosen[chosen >= place]
            total = 0.0
            for k, t in enumerate(ahead):
                after = batch.values[row, ahead[k + 1]] if k + 1 < len(ahead) else 0.0
                delta = batch.rewards[row, t] + gamma * after - batch.values[row, t]
                total += (gamma * lam) ** k * delta
            raw[row, place] = total
    return whiten(raw, batch.mask), raw + batch.values


def reinforce_plus_plus(batch: NumpyBatch, gamma: float) -> Pair:
    returns = np.zeros_like(batch.rewards)
    for row in range(returns.shape[0]):
        chosen = np.flatnonzero(batch.mask[row])
        for i, t in enumerate(chosen):
            returns[row, t] = sum(
                gamma**k * batch.rewards[row, later] for k, later in enumerate(chosen[i:])
            )
    return whiten(returns, batch.mask) * batch.mask, returns


def reinforce_plus_plus_baseline(batch: NumpyBatch) -> Pair:
    found = whiten(dr_grpo(batch)[0], batch.mask) * batch.mask
    return found, found


def rloo(batch: NumpyBatch, alone: float = 1.0) -> Pair:
    def rule(scores: Floats, _lengths: Floats) -> Floats:
        if scores.size == 1:
            return scores * alone
        return np.array([own - np.delete(scores, i).mean() for i, own in enumerate(scores)])

    return broadcast(batch, by_group(batch, rule, batch.rewards.sum(1)))


def opo(batch: NumpyBatch) -> Pair:
    def rule(scores: Floats, lengths: Floats) -> Floats:
        return scores if scores.size == 1 else scores - np.average(scores, weights=lengths)

    return broadcast(batch, by_group(batch, rule, batch.rewards.sum(1)))


def to_go(batch: NumpyBatch) -> Floats:
    masked = batch.rewards * batch.mask
    return np.array([[row[t:].sum() for t in range(row.size)] for row in masked])


def remax(batch: NumpyBatch) -> Pair:
    returns = to_go(batch)
    return returns - batch.baselines[:, None] * batch.mask, returns


def gpg(batch: NumpyBatch) -> Pair:
    scores = batch.rewards.sum(1)
    alpha = scores.size / max(int((scores != 0).sum()), 1)
    return broadcast(batch, alpha * by_group(batch, centred, scores))


def adpo(batch: NumpyBatch) -> Pair:
    def rule(scores: Floats, _lengths: Floats) -> Floats:
        if scores.size == 1:
            return np.zeros(1)
        return np.asarray((scores - scores.mean()) / max(scores.std(ddof=1), 1e-5))

    scores = (batch.rewards * batch.mask).sum(1)
    return broadcast(batch, by_group(batch, rule, scores))[0], scores[:, None] * batch.mask


def token_baseline(batch: NumpyBatch, *, compact: bool) -> Pair:
    """Positions are the columns, or with `compact` the how-manieth chosen token of a row."""
    returns, found = to_go(batch), np.zeros_like(batch.rewards)
    norms = (1 - 2 * np.exp(batch.logprobs) + batch.sum_pi_squared) * batch.weights**2
    energy = np.cumsum(norms * batch.mask, axis=1)
    for rows in batch.groups():
        used = [row for row in rows if batch.mask[row].any()] if compact else list(rows)
        lengths = sorted((int(batch.mask[row].sum()) for row in used), reverse=True)
        for row in used:
            for nth, t in enumerate(np.flatnonzero(batch.mask[row])):
                place = nth if compact else int(t)
                baseline = _baseline(batch, returns, energy, used, place, compact=compact)
                length = int(batch.mask[row].sum())
                alone = len(used) == 1 or (length > lengths[1] and place >= lengths[1])
                found[row, t] = returns[row, t] - (0.0 if alone else baseline)
    return found, returns


def _baseline(
    batch: NumpyBatch,
    returns: Floats,
    energy: Floats,
    rows: list[int],
    place: int,
    *,
    compact: bool,
) -> float:
    numerator, denominator = 0.0, 1e-8
    for row in rows:
        chosen = np.flatnonzero(batch.mask[row])
        if compact and place < chosen.size:
            t = int(chosen[place])
        elif not compact and batch.mask[row, place]:
            t = place
        else:
            continue
        numerator += returns[row, t] * energy[row, t]
        denominator += energy[row, t]
    return float(numerator / denominator)
