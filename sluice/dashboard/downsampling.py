"""Fewer points of a long curve, such that no peak and no gap is lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["FEWEST_POINTS", "bucket_edges", "bucket_sums", "kept_points"]

FEWEST_POINTS = 4

Values = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]


def kept_points(values: Values, most: int) -> Indexes:
    """Which points of a curve to show: at most `most`, in order.

    First and last point are always among them, and of each of the equal stretches between those its
    smallest and its largest value. A stretch without any number (NaN) keeps one point, so that the
    gap is seen.

    Args:
        values: [points], in the order of the curve; NaN where there is no value.
        most: at least `FEWEST_POINTS`.

    Returns:
        [kept] indexes into `values`, rising.

    Raises:
        ValueError: `most` is too small.
    """
    if most < FEWEST_POINTS:
        raise ValueError(f"{most} points are too few for a curve; at least {FEWEST_POINTS}")
    if values.size <= most:
        return np.arange(values.size)
    edges = bucket_edges(values.size - 2, (most - 2) // 2) + 1
    kept = [0, values.size - 1]
    for begin, end in pairwise(edges):
        stretch = values[begin:end]
        if np.isnan(stretch).all():
            kept.append(int(begin))
        else:
            kept += [int(begin + np.nanargmin(stretch)), int(begin + np.nanargmax(stretch))]
    return np.unique(np.asarray(kept, dtype=np.int64))


def bucket_edges(num_points: int, most: int) -> Indexes:
    """Where to cut `num_points` into at most `most` stretches that differ by one point at most.

    Returns:
        [stretches + 1] from 0 to `num_points`; stretches are never empty.
    """
    num_buckets = max(min(num_points, most), 1)
    return np.linspace(0, num_points, num_buckets + 1).round().astype(np.int64)


def bucket_sums(values: Values, edges: Indexes) -> Values:
    """[stretches] the sum over each stretch; NaN counts as 0.

    Args:
        values: [points].
        edges: [stretches + 1], of `bucket_edges`.
    """
    running = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    sums: Values = running[edges[1:]] - running[edges[:-1]]
    return sums
