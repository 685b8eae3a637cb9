"""Metrics of one train batch by verl's names: rewards, advantages, lengths, balance, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sluice.algorithm.episodes import response_length
from sluice.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

FloatRows = npt.NDArray[np.float64]
IntRows = npt.NDArray[np.int64]

RESPONSE_PHASES = ("gen",)
"""Phases whose time is divided by response tokens; all others by prompt and response tokens."""

PER_TOKEN_PHASES = ("gen", "ref", "values", "adv", "update_critic", "update_actor")


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """One entry per response, groups one after the other; all arrays are [rows].

    The last four are there if any row is an episode; `longest_paths` are the tokens of the longest
    conversation beyond its prompt, read ones included.
    """

    rewards: FloatRows
    prompt_lengths: IntRows
    response_lengths: IntRows
    read_lengths: IntRows | None = None  # tokens that turns read beyond the prompt
    turns: IntRows | None = None
    roots: IntRows | None = None
    longest_paths: IntRows | None = None

    @property
    def lengths(self) -> IntRows:
        """All tokens of each row: its prompt's, and those it sampled and read."""
        without_read = self.prompt_lengths + self.response_lengths
        return without_read if self.read_lengths is None else without_read + self.read_lengths


def batch_rows(batch: TrainBatch) -> BatchRows:
    """Lay a batch out by rows, in the order of its groups and their rollouts."""
    rows = [(group, i) for group in batch.groups for i in range(len(group.rollouts))]
    episodes: dict[str, IntRows] = {}
    if any(not g.rollouts[i].is_plain for g, i in rows):
        counts = [
            (
                rollout.num_context_tokens,
                len(rollout.turns),
                rollout.num_roots,
                response_length(rollout.turns),
            )
            for rollout in (g.rollouts[i] for g, i in rows)
        ]
        names = ("read_lengths", "turns", "roots", "longest_paths")
        episodes = dict(zip(names, np.array(counts, dtype=np.int64).T, strict=True))
    return BatchRows(
        rewards=np.array([group.scores[i].reward for group, i in rows], dtype=np.float64),
        prompt_lengths=np.array([g.prompt_token_ids.size for g, _ in rows], dtype=np.int64),
        response_lengths=np.array([g.rollouts[i].num_tokens for g, i in rows], dtype=np.int64),
        **episodes,
    )


def batch_metrics(
    rows: BatchRows, *, max_prompt_tokens: int, max_response_tokens: int
) -> dict[str, float]:
    """Return metrics that depend on the batch alone.

    ``critic/score`` contains the overlong penalty and, like ``response_length_non_aborted``, counts
    rows with tokens only. The length of an episode is that of its longest conversation, read tokens
    included. ``clip_ratio`` is the share of rows at the limit. A metric over no rows is left out.
    """
    with_tokens = rows.response_lengths > 0
    lengths = rows.response_lengths if rows.longest_paths is None else rows.longest_paths
    return {
        **spread("critic/score", rows.rewards[with_tokens]),
        **_lengths("response_length", lengths, max_response_tokens),
        **_lengths("response_length_non_aborted", lengths[with_tokens], max_response_tokens),
        **_lengths("prompt_length", rows.prompt_lengths, max_prompt_tokens),
        "response/aborted_ratio": 1.0 - float(with_tokens.mean()) if with_tokens.size else 0.0,
        **_episodes(rows),
    }


def _episodes(rows: BatchRows) -> dict[str, float]:
    if rows.read_lengths is None or rows.turns is None or rows.roots is None:
        return {}
    return {
        **spread("num_turns", 2 * rows.turns),  # each answer and what it answers
        "episodes/roots/mean": float(rows.roots.mean()),
        "episodes/tokens_read": float(rows.read_lengths.sum()),
        "episodes/tokens_sampled": float(rows.response_lengths.sum()),
    }


def sequence_balance_metrics(
    row_tokens: IntRows, rank_rows: Sequence[Sequence[int]]
) -> dict[str, float]:
    """``global_seqlen/*``: how evenly tokens fall on ranks, before and after balancing.

    ``min``, ``max`` and ``minmax_diff`` describe cutting the batch into consecutive chunks of
    rows; ``balanced_min`` and ``balanced_max`` the assignment really used.

    Args:
        row_tokens: prompt and response tokens of each row, int64 [rows].
        rank_rows: rows of each rank (`packing.assign_rows_to_ranks`).
    """
    num_ranks = len(rank_rows)
    chunks = [int(chunk.sum()) for chunk in np.array_split(row_tokens, num_ranks)]
    balanced = [int(row_tokens[list(rows)].sum()) for rows in rank_rows]
    return {
        "global_seqlen/min": float(min(chunks)),
        "global_seqlen/max": float(max(chunks)),
        "global_seqlen/minmax_diff": float(max(chunks) - min(chunks)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": float(row_tokens.sum()) / num_ranks,
    }


def spread(name: str, values: npt.NDArray[np.number] | Tensor) -> dict[str, float]:
    """Return mean, maximum and minimum of numbers [n]; nothing for none."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _lengths(name: str, lengths: IntRows, limit: int) -> dict[str, float]:
    if lengths.size == 0:
        return {}
    return {**spread(name, lengths), f"{name}/clip_ratio": float((lengths >= limit).mean())}


def batch_tokens(batch: TrainBatch) -> tuple[int, int]:
    """Return a batch's response tokens, and all tokens with the prompt counted for each row."""
    prompts = responses = num_read = 0
    for group in batch.groups:
        prompts += int(group.prompt_token_ids.size) * len(group.rollouts)
        responses += sum(rollout.num_tokens for rollout in group.rollouts)
        num_read += sum(rollout.num_context_tokens for rollout in group.rollouts)
    return responses, prompts + responses + num_read


def throughput_metrics(
    phase_seconds: Mapping[str, float],
    *,
    total_tokens: int,
    response_tokens: int,
    num_ranks: int,
) -> dict[str, float]:
    """Return seconds and speed: ``timing_s/*``, ``timing_per_token_ms/*`` and ``perf/*``.

    Throughput is prompt and response tokens per second **per rank** (per GPU in verl's words).

    Args:
        phase_seconds: seconds by phase (``gen``, ``update_actor``, ...); ``step`` is the whole.
        total_tokens: prompt and response tokens of the batch, the prompt counted for every row.
        response_tokens: response tokens of the batch.
    """
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in phase_seconds.items()}
    metrics["perf/total_num_tokens"] = float(total_tokens)
    for phase in PER_TOKEN_PHASES:
        tokens = response_tokens if phase in RESPONSE_PHASES else total_tokens
        if phase in phase_seconds and tokens:
            metrics[f"timing_per_token_ms/{phase}"] = 1000.0 * phase_seconds[phase] / tokens
    step_seconds = phase_seconds.get("step", 0.0)
    if step_seconds > 0.0:
        metrics["perf/time_per_step"] = step_seconds
        metrics["perf/throughput"] = total_tokens / (step_seconds * num_ranks)
    return metrics
