"""A train batch on this rank: as tables [rows, longest response], and cut into mini-batches.

Advantages need the whole batch, while forward passes run on packed micro-batches of one rank;
tables collect the results of all ranks' passes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch, build_micro_batch
from services.trainer.learner.batch.packed_rows import TrainingRow, training_rows
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.losses.inputs import GlobalCounts
from sluice.algorithm.packing import (
    MicroBatchPlan,
    assign_rows_to_ranks,
    plan_micro_batches,
    plan_minibatches,
)
from sluice.errors import ConfigError, PeerError
from sluice.types import RoutedExperts, TrainBatch, TrainGroup, expert_dtype, is_absent
from sluice.vision.image_prompts import ImagePrompt, ImagePromptReader


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """The batch's rows in the order of its groups and their rollouts.

    W is the largest number of tokens sampled for a row, over all turns.
    """

    rewards: Tensor  # float32 [rows]
    group_index: Tensor  # int64 [rows]
    mask: Tensor  # bool [rows, W], true at tokens
    baselines: Tensor  # float32 [rows], reward of the prompt's greedy response; nan without one
    turn_rewards: Tensor | None = None  # float32 [rows, W], each at its turn's last token


def batch_table(batch: TrainBatch, device: torch.device) -> BatchTable:
    """Return the batch as a table."""
    rows = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rollouts))]
    lengths = torch.tensor([batch.groups[g].rollouts[i].num_tokens for g, i in rows], device=device)
    width = max(1, int(lengths.max()))
    mask = torch.arange(width, device=device) < lengths[:, None]
    return BatchTable(
        rewards=torch.tensor(
            [batch.groups[g].scores[i].reward for g, i in rows], dtype=torch.float32, device=device
        ),
        group_index=torch.tensor([g for g, _ in rows], device=device),
        mask=mask,
        baselines=_baselines(batch, device),
        turn_rewards=_turn_rewards(batch, width, device),
    )


def _turn_rewards(batch: TrainBatch, width: int, device: torch.device) -> Tensor | None:
    """Return the rewards of turns as a table; ``None`` if no turn has a reward.

    The reward of a turn without tokens is placed at the last token before it.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    by_token: dict[tuple[int, int], float] = {}
    for row, rollout in enumerate(rollouts):
        if all(turn.reward is None for turn in rollout.turns):
            continue
        end = 0
        for turn in rollout.turns:
            end += turn.token_ids.size
            column = max(end - 1, 0)
            by_token[row, column] = by_token.get((row, column), 0.0) + (turn.reward or 0.0)
    if not by_token:
        return None
    values = np.zeros((len(rollouts), width), np.float32)
    for place, reward in by_token.items():
        values[place] = reward
    return torch.from_numpy(values).to(device)


def _baselines(batch: TrainBatch, device: torch.device) -> Tensor:
    missing = float("nan")
    baselines = [
        missing if group.baseline_reward is None else group.baseline_reward
        for group in batch.groups
        for _ in group.rollouts
    ]
    return torch.tensor(baselines, dtype=torch.float32, device=device)


def reward_components(
    batch: TrainBatch, names: Sequence[str], device: torch.device
) -> Mapping[str, Tensor]:
    """Return the scorer's named values, float32 [rows] each.

    Raises:
        ConfigError: a sample lacks a value.
    """
    scores = [scored for group in batch.groups for scored in group.scores]
    for name in names:
        if any(name not in scored.metrics for scored in scores):
            returned = sorted(set[str]().union(*(scored.metrics for scored in scores)))
            raise ConfigError(
                f"algorithm.gdpo_reward_keys: '{name}' is not among the values that the reward "
                f"function returns for every sample ({', '.join(returned)})"
            )
    return {
        name: torch.tensor([scored.metrics[name] for scored in scores], device=device)
        for name in names
    }


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Sizes of a model: layers with experts, experts per layer, and experts per token."""

    layers: int
    num_experts: int
    per_token: int


def check_routing(batch: TrainBatch, shape: RoutingShape | None) -> None:
    """Refuse samples whose experts are not those of their tokens in this model.

    Args:
        shape: the sizes of the trained model; ``None`` if it has no experts that passes could
            follow.

    Raises:
        PeerError: names the group, the sample or prompt, and the numbers.
    """
    for group in batch.groups:
        prompt_tokens = group.prompt_token_ids.size
        parts = [("prompt", prompt_tokens, group.prompt_routing)]
        # No pass has read the last token. An empty response has no routing.
        parts += [
            (
                f"sample {rollout.sample_index}",
                prompt_tokens + rollout.num_context_tokens + max(0, rollout.num_tokens - 1),
                rollout.routing,
            )
            for rollout in group.rollouts
        ]
        for name, tokens, routing in parts:
            if routing is None or is_absent(routing):
                continue
            if wrong := _wrong_experts(tokens, routing, shape):
                raise PeerError(
                    "reward service",
                    "handing out a batch",
                    f"batch {batch.batch_id}, group {group.prompt_id}, {name}: {wrong}; engine and "
                    "trainer need the same model. The batch is refused and was not trained",
                )


def _wrong_experts(tokens: int, experts: RoutedExperts, shape: RoutingShape | None) -> str:
    if shape is None:
        return "experts for a model without any"
    expected = (tokens, shape.layers, shape.per_token)
    if experts.shape != expected:
        return f"experts {experts.shape} instead of [tokens, layers, experts per token] {expected}"
    if experts.dtype != expert_dtype(shape.num_experts):
        return f"experts in {experts.dtype} for {shape.num_experts} experts in a layer"
    if (highest := int(experts.max())) >= shape.num_experts:
        return f"expert {highest} of {shape.num_experts}"
    ends = np.sort(experts[[0, -1]], axis=-1)  # all tokens would take too long
    if (ends[..., 1:] == ends[..., :-1]).any():
        return "a token has an expert twice in a layer"
    return ""


def gather_tokens(
    outputs: Iterable[tuple[MicroBatch, Tensor]],
    table: BatchTable,
    parallel: ParallelContext,
    phase: str,
) -> Tensor:
    """Return a table [rows, W] of the values [N] of all ranks' micro-batches. Collective.

    Each token belongs to one rank, so a sum over ranks assembles the table; it is 0 outside the
    mask.
    """
    values = torch.zeros(table.mask.shape, dtype=torch.float32, device=table.mask.device)
    for micro_batch, tokens in outputs:
        values[micro_batch.batch_rows, micro_batch.columns] = tokens.detach().float()
    parallel.sum_rows(values, phase)
    return values


def tokens_of(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the values [N] of a micro-batch's tokens from a table."""
    return values[micro_batch.batch_rows, micro_batch.columns]


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """This rank's micro-batches of one optimizer step, and the step's counts over all ranks.

    The counts include empty responses and skipped rows, which have a loss of 0 and stay in the
    denominators. `rank_rows` are the rows that each rank trains, as indices in the train batch.
    """

    micro_batches: tuple[MicroBatch, ...]
    counts: GlobalCounts
    rank_rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BatchCut:
    """How to cut a train batch; either `token_budget` or `rows_per_micro` is set.

    `whole_groups` keeps all rows of a prompt in one micro-batch, for losses that compare them. With
    a `shuffle_seed`, groups are permuted first. A micro-batch is padded to a multiple of `pad_to`
    tokens. It includes the engine's experts of `routed_layers`, counted among the layers with
    experts; ``None`` for none.
    """

    mini_batch_groups: int
    token_budget: int | None
    rows_per_micro: int | None
    shuffle_seed: int | None = None
    whole_groups: bool = False
    pad_to: int = 1
    routed_layers: slice | None = None


def split_batch(
    groups: Sequence[TrainGroup],
    cut: BatchCut,
    parallel: ParallelContext,
    *,
    step: int,
    device: torch.device,
    image_prompts: ImagePromptReader | None = None,
    skipped: Container[int] = (),
) -> list[MiniBatch]:
    """Cut a train batch into mini-batches of groups, and this rank's rows into micro-batches.

    Seed and `step` determine the shuffle, so all ranks agree without communication. Mini-batches
    stay the same in all ``ppo_epochs`` passes. Images are decoded only for this rank's rows, once
    per mini-batch; a rank that shares sequences decodes only the images that it encodes. Rows of
    the batch in `skipped` are in no micro-batch.

    Raises:
        ConfigError: the groups do not divide into mini-batches, or a group has images and
            `image_prompts` is missing.
    """
    return [
        _mini_batch(shares, cut, parallel, device, image_prompts)
        for shares in _divide(groups, cut, parallel, step, skipped)
    ]


def own_rows(
    groups: Sequence[TrainGroup],
    cut: BatchCut,
    parallel: ParallelContext,
    *,
    step: int,
    skipped: Container[int] = (),
) -> set[int]:
    """Return the numbers of the samples that `split_batch` reads on this rank.

    Only lengths matter, so tokens may be absent.

    Raises:
        ConfigError: the groups do not divide into mini-batches.
    """
    return {
        shares.rows[index].number
        for shares in _divide(groups, cut, parallel, step, skipped)
        for index in shares.of_ranks[parallel.data_rank]
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Shares:
    """A mini-batch divided over ranks: `of_ranks` holds indices into `rows`, without skipped
    rows."""

    groups: Sequence[TrainGroup]
    all_rows: Sequence[TrainingRow]
    rows: Sequence[TrainingRow]
    of_ranks: Sequence[Sequence[int]]


def _divide(
    groups: Sequence[TrainGroup],
    cut: BatchCut,
    parallel: ParallelContext,
    step: int,
    skipped: Container[int],
) -> Iterator[_Shares]:
    """Divide a batch. Every rank computes the shares of all ranks."""
    order = np.arange(len(groups))
    if cut.shuffle_seed is not None:
        order = np.random.default_rng([cut.shuffle_seed, step]).permutation(len(groups))
    # Rows keep their indices in the whole batch: tables find their tokens by them.
    ends = list(accumulate(len(group.rollouts) for group in groups))
    numbers = [range(end - len(g.rollouts), end) for g, end in zip(groups, ends, strict=True)]
    for members in plan_minibatches(len(groups), cut.mini_batch_groups):
        chosen = [groups[order[i]] for i in members]
        all_rows = training_rows(chosen, [numbers[order[i]] for i in members], cut.routed_layers)
        rows = [row for row in all_rows if row.number not in skipped]
        of_ranks = assign_rows_to_ranks(
            [row.size for row in rows], parallel.layout.data_ranks, keeps_groups=cut.whole_groups
        )
        yield _Shares(chosen, all_rows, rows, of_ranks)


def _mini_batch(
    shares: _Shares,
    cut: BatchCut,
    parallel: ParallelContext,
    device: torch.device,
    image_prompts: ImagePromptReader | None,
) -> MiniBatch:
    groups, rows = shares.groups, shares.rows
    share = shares.of_ranks[parallel.data_rank]
    missing = [rows[index].number for index in share if is_absent(rows[index].token_ids)]
    assert not missing, f"samples {missing} are another rank's"
    of_sources: dict[str, list[int]] = {}
    for index in share:  # each source has its own loss, so a pass holds rows of one source
        of_sources.setdefault(groups[rows[index].group].source, []).append(index)
    plans = [
        (source, planned)
        for source, indices in of_sources.items()
        for planned in plan_micro_batches(
            [row.size for row in rows],
            indices,
            token_budget=cut.token_budget,
            rows_per_micro=cut.rows_per_micro,
            keeps_groups=cut.whole_groups,
        )
    ]
    images = _images(groups, rows, [planned for _, planned in plans], image_prompts)
    pad_to = math.lcm(cut.pad_to, parallel.token_multiple)
    micro_batches = (
        build_micro_batch(
            rows, planned, device, images, parallel.share, pad_to, source, parallel.image_ranks
        )
        for source, planned in plans
    )
    # Counts of all rows: the loss must not depend on which rank computes or skips a row.
    return MiniBatch(
        tuple(micro_batch for micro_batch in micro_batches if micro_batch is not None),
        GlobalCounts(
            tokens=sum(row.num_trained for row in shares.all_rows),
            rows=len(shares.all_rows),
            groups=len(groups),
        ),
        tuple(tuple(rows[index].number for index in indices) for indices in shares.of_ranks),
    )


def _images(
    groups: Sequence[TrainGroup],
    rows: Sequence[TrainingRow],
    plans: Sequence[MicroBatchPlan],
    image_prompts: ImagePromptReader | None,
) -> dict[int, ImagePrompt]:
    """Return the images of the planned rows' prompts, by index in the mini-batch.

    They are decoded at most once, when a micro-batch packs their pixels.
    """
    planned = sorted({rows[index].group for plan in plans for index in plan.row_indices})
    with_images = [index for index in planned if groups[index].images]
    if with_images and image_prompts is None:
        raise ConfigError(
            f"prompt {groups[with_images[0]].prompt_id} comes with images, which the model to be "
            "trained does not read; train a vision-language model (actor_rollout_ref.model.path), "
            "without a critic"
        )
    return {
        index: image_prompts.lay_out(groups[index].prompt_token_ids, groups[index].images)
        for index in with_images
        if image_prompts is not None
    }
