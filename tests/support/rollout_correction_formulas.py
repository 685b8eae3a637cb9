"""Rollout correction in float64 NumPy on padded rows, written for the parity tests.

Metric names are verl's without the prefix ``rollout_corr/``. Every row has a token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def random_logprobs(seed: int, spread: float = 0.4) -> tuple[Floats, Floats, Mask]:
    """Trainer's and engine's logprobs and the mask, [6, 11]; numbers are exact in float32."""
    rng = np.random.default_rng(seed)
    behavior = -rng.exponential(size=(6, 11)).astype(np.float32)
    old = np.minimum(behavior + rng.normal(0.0, spread, (6, 11)), -1e-3).astype(np.float32)
    mask = np.arange(11) < rng.integers(1, 12, 6)[:, None]
    return old.astype(np.float64), behavior.astype(np.float64), mask


def spread_metrics(name: str, values: Floats) -> dict[str, float]:
    return {
        f"{name}_mean": values.mean(),
        f"{name}_std": values.std(ddof=1),
        f"{name}_max": values.max(),
        f"{name}_min": values.min(),
    }


def row_means(values: Floats, mask: Mask) -> Floats:
    return np.array([row[chosen].mean() for row, chosen in zip(values, mask, strict=True)])


def raw_weights(x: Floats, mask: Mask, level: str) -> Floats:
    exponent = x if level == "token" else np.repeat((x * mask).sum(1)[:, None], x.shape[1], 1)
    return np.asarray(np.exp(np.clip(exponent, -20, 20)))


def bounded(raw: Floats, lower: float | None, upper: float) -> Floats:
    if lower is None:
        return np.minimum(raw, upper)
    return np.where((raw < lower) | (raw > upper), 0.0, raw)


def weight_metrics(
    x: Floats, mask: Mask, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    raw = raw_weights(x, mask, level)
    weights = bounded(raw, lower, upper)
    low = lower if lower is not None else 1.0 / upper
    chosen, raw_chosen = weights[mask], raw[mask]
    of_rows, raw_rows = row_means(weights, mask), row_means(raw, mask)
    judged = raw_chosen if level == "token" else raw_rows
    extremes = chosen if level == "token" else np.exp((x * mask).sum(1))
    found = {
        "rollout_is_mean": chosen.mean(),
        "rollout_is_std": chosen.std(),
        "rollout_is_max": extremes.max(),
        "rollout_is_min": extremes.min(),
        "rollout_is_eff_sample_size": 1.0 / ((chosen / chosen.mean()) ** 2).mean(),
        "rollout_is_ratio_fraction_high": (judged > upper).mean(),
        "rollout_is_ratio_fraction_low": (judged < low).mean(),
        **spread_metrics("rollout_is_seq", of_rows),
        "rollout_is_seq_max_deviation": np.abs(of_rows - 1).max(),
        "rollout_is_seq_fraction_high": (raw_rows > upper).mean(),
        "rollout_is_seq_fraction_low": (raw_rows < low).mean(),
    }
    if lower is not None:
        found["rollout_is_oob_ratio"] = ((raw_chosen < low) | (raw_chosen > upper)).mean()
    return found


def divergence(x: Floats, estimator: str) -> Floats:
    x = np.clip(x, -20, 20)
    return {"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - 1 - x}[estimator]


def row_statistic(values: Floats, mask: Mask, scope: str) -> Floats:
    chosen = [row[m] for row, m in zip(values, mask, strict=True)]
    if scope == "seq_sum":
        return np.array([row.sum() for row in chosen])
    return np.array([row.max() if scope == "seq_max" else row.mean() for row in chosen])


def rejection(
    x: Floats, mask: Mask, option: str, lower: float | None, upper: float
) -> tuple[Mask, dict[str, float]]:
    """Kept positions, and the option's metrics; bounds are those of the statistic."""
    scope, estimator = option.rsplit("_", 1)
    of_tokens = divergence(x, estimator)
    of_rows = row_statistic(of_tokens, mask, scope)
    if scope != "token":
        of_tokens = np.repeat(of_rows[:, None], x.shape[1], 1)
    least = -np.inf if lower is None else lower
    kept = (of_tokens >= least) & (of_tokens <= upper)
    chosen = of_tokens[mask]
    judged = chosen if scope == "token" else of_rows
    name = f"rollout_rs_{option}"
    metrics = {
        f"{name}_mean": chosen.mean(),
        f"{name}_max": judged.max(),
        f"{name}_min": judged.min(),
        f"{name}_std": np.clip(chosen, 0.0 if lower is None else lower, upper).std(),
        f"{name}_fraction_high": (judged > upper).mean(),
        f"{name}_fraction_low": (judged < least).mean(),
        **spread_metrics(f"{name}_seq", of_rows),
        f"{name}_seq_max_deviation": np.abs(of_rows).max(),
        f"{name}_seq_fraction_high": (of_rows > upper).mean(),
        **masked_fractions(name, kept, mask),
    }
    if lower is not None:
        metrics[f"{name}_seq_fraction_low"] = (of_rows < lower).mean()
    return kept, metrics


def masked_fractions(name: str, kept: Mask, mask: Mask) -> dict[str, float]:
    return {
        f"{name}_masked_fraction": (~kept)[mask].mean(),
        f"{name}_seq_masked_fraction": (~kept & mask).any(1).mean(),
    }


def diagnostics(old: Floats, behavior: Floats, mask: Mask) -> dict[str, float]:
    x = (old - behavior)[mask]
    training, rollout = -row_means(old, mask), -row_means(behavior, mask)
    sums = np.clip(((old - behavior) * mask).sum(1), -20, 20)
    return {
        "training_ppl": np.exp(training).mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": np.exp(rollout).mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": (training - rollout).mean(),
        "log_ppl_abs_diff": np.abs(training - rollout).mean(),
        "log_ppl_diff_max": (training - rollout).max(),
        "log_ppl_diff_min": (training - rollout).min(),
        "ppl_ratio": np.exp(training - rollout).mean(),
        "kl": -x.mean(),
        "k3_kl": (np.exp(x) - x - 1).mean(),
        "chi2_token": (np.exp(np.clip(x, -20, 20)) ** 2).mean() - 1,
        "chi2_seq": np.exp(2 * sums).mean() - 1,
    }
