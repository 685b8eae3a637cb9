"""Packed episodes give the logprobs and gradients of plain passes over each turn's sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.learner.batch import micro_batch as packing
from services.trainer.learner.batch.micro_batch import build_micro_batch
from services.trainer.learner.batch.packed_rows import TrainingRow, training_rows
from services.trainer.learner.batch.train_batch import BatchCut, batch_table, own_rows, split_batch
from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.forward import TokenPass, token_outputs
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.loss import first_of_rows
from sluice.algorithm.packing import piece_tokens, plan_micro_batches, whole_groups
from sluice.types import TrainGroup
from tests.support.episodes import (
    COMPACTED,
    LINEAR,
    NO_TOKENS,
    READS_FIRST,
    TREE,
    make_episode_batch,
    make_episodes,
)
from tests.support.layer_parity import (
    MAX_ERROR,
    TEMPERATURE,
    gradients,
    pack,
    plain,
    weighed,
    worst_error,
)
from tests.support.taken_samples import outline_of
from tests.support.tiny_policy import make_batch, make_group, make_model

CPU = torch.device("cpu")


def rows_of(*groups: TrainGroup) -> list[TrainingRow]:
    ends = np.cumsum([len(group.rollouts) for group in groups]).tolist()
    numbers = [range(end - len(g.rollouts), end) for g, end in zip(groups, ends, strict=True)]
    return training_rows(groups, numbers)


def mixed_rows() -> list[TrainingRow]:
    return rows_of(
        make_episodes(1, (LINEAR, TREE, COMPACTED, READS_FIRST)),
        make_group(2, (3, 0, 7)),
        make_episodes(3, (TREE, NO_TOKENS)),
    )


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_neox"])
def test_each_sampled_token_weighs_once_as_in_a_pass_over_its_own_turn(family: str) -> None:
    model, rows = make_model(family), mixed_rows()
    plain_logprobs, expected = plain(model, some=rows)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack(rows)
    logprobs = token_outputs(model, TokenPass(packed, TEMPERATURE)).logprobs
    torch.testing.assert_close(logprobs.detach(), plain_logprobs, atol=1e-5, rtol=1e-5)
    assert worst_error(gradients(model, weighed(logprobs, packed)), expected) <= MAX_ERROR


def test_blocks_without_a_mask_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_MASK_ELEMENTS", 0)
    monkeypatch.setattr(packing, "MIN_BLOCK_TOKENS", 0)
    test_each_sampled_token_weighs_once_as_in_a_pass_over_its_own_turn("qwen3")


def test_logits_after_tokens_that_are_only_read_have_no_gradient() -> None:
    model = make_model()
    model.set_attn_implementation(PACKED_ATTENTION)
    (row,) = rows_of(make_episodes(1, (TREE, LINEAR)))[:1]
    packed = pack([row])
    outputs = model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        packed_layout=packed.layout.for_one_pass(),
    )
    logits = outputs.logits[0]
    logits.retain_grad()
    logprobs = logits.log_softmax(-1)[packed.predecessors].gather(-1, packed.labels[:, None])
    logprobs.sum().backward()
    assert logits.grad is not None
    touched = set(logits.grad.abs().sum(-1).nonzero()[:, 0].tolist())
    assert touched == set(packed.predecessors.tolist())
    assert len(touched) < packed.input_ids.numel() - row.prompt_token_ids.size + 1
    assert len(packed.labels) == sum(turn.token_ids.size for turn in row.turns)


def test_linear_turns_are_the_plain_pass_over_the_joined_sequence() -> None:
    model = make_model()
    (row,) = rows_of(make_episodes(1, (LINEAR, LINEAR)))[:1]
    parts = [part for turn in row.turns for part in (turn.context, turn.token_ids)]
    joined = np.concatenate([row.prompt_token_ids, *parts]).astype(np.int64)
    logits = model(input_ids=torch.from_numpy(joined)[None], use_cache=False).logits[0]
    each = (logits[:-1] / TEMPERATURE).log_softmax(-1)
    each = each.gather(1, torch.from_numpy(joined[1:, None]))[:, 0]
    sampled = np.concatenate([np.full(part.size, i % 2) for i, part in enumerate(parts)])
    expected = each[row.prompt_token_ids.size - 1 :][torch.from_numpy(sampled) == 1]
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack([row])
    # The whole sequence but its last token is computed, once.
    assert packed.input_ids[0].tolist() == joined[:-1].tolist()
    assert packed.position_ids[0].tolist() == list(range(joined.size - 1))
    assert packed.columns.tolist() == list(range(row.token_ids.size))
    found = token_outputs(model, TokenPass(packed, TEMPERATURE)).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_compacted_episode_is_two_sequences_of_one_row() -> None:
    group = make_episodes(1, (COMPACTED, LINEAR))
    rows = rows_of(group)
    first, second = rows[0].size, rows[1].size
    before, after = 2 + 2 + 3 + 2 + 3, 6 + 4
    assert (first.paths, first.alone, first.response_tokens) == ((before,), (after,), 22)
    packed = pack(rows)
    assert packed.num_rows == 2
    assert packed.row_groups == (0, 0)
    assert (packed.rows == 0).sum() == 2 + 3 + 3 + 4
    (piece,) = whole_groups([first, second], range(2))
    # The prompt counts once; the last token of each of three sequences is no input.
    assert packed.input_ids.numel() == piece_tokens([first, second], piece) - 3
    # Positions count from the prompt's end, and from 0 after the compaction.
    prompt = int(group.prompt_token_ids.size)
    spans = [(0, prompt), (prompt, before - 1), (0, after - 1), (prompt, 3 + 4 + 5 - 1)]
    positions = [position for start, size in spans for position in range(start, start + size)]
    assert packed.position_ids[0].tolist() == positions


def test_every_sampled_token_is_in_the_mask_and_counted_once() -> None:
    batch = make_episode_batch()
    table = batch_table(batch, CPU)
    rollouts = [one for group in batch.groups for one in group.rollouts]
    for row, rollout in zip(table.mask, rollouts, strict=True):
        num = rollout.num_tokens
        assert row.tolist() == [True] * num + [False] * (row.numel() - num)
    cut = BatchCut(mini_batch_groups=6, token_budget=None, rows_per_micro=24)
    (mini_batch,) = split_batch(batch.groups, cut, ParallelContext(), step=1, device=CPU)
    (micro_batch,) = mini_batch.micro_batches
    assert mini_batch.counts.tokens == int(table.mask.sum()) == micro_batch.labels.numel()
    assert mini_batch.counts.rows == 24
    found = torch.zeros_like(table.mask, dtype=torch.int64)
    places = (micro_batch.batch_rows, micro_batch.columns)
    found.index_put_(places, torch.ones_like(micro_batch.columns), accumulate=True)
    assert torch.equal(found, table.mask.long())


def test_the_value_of_a_row_is_that_of_its_first_token() -> None:
    shapes = (replace(LINEAR[0], tokens=0), *LINEAR[1:])
    packed = pack(rows_of(make_episodes(1, (shapes, NO_TOKENS, LINEAR))))
    assert packed.columns[0] == 0
    values = torch.arange(1.0, 1.0 + packed.labels.numel())
    assert first_of_rows(values, packed).tolist() == [1.0, 0.0, 7.0]


@pytest.mark.parametrize("budget", [24, 40, 70, 1000])
def test_micro_batches_keep_the_budget_and_all_paths_of_a_sample(budget: int) -> None:
    batch = make_episode_batch()
    cut = BatchCut(mini_batch_groups=3, token_budget=budget, rows_per_micro=None)
    mini_batches = split_batch(batch.groups, cut, ParallelContext(), step=1, device=CPU)
    packed = [one for mini_batch in mini_batches for one in mini_batch.micro_batches]
    for micro_batch in packed:
        if micro_batch.num_rows > 1:
            assert micro_batch.input_ids.numel() <= budget
    owners = [row for one in packed for row in set(one.batch_rows.tolist())]
    assert len(owners) == len(set(owners))
    trained = batch_table(batch, CPU).mask.sum(-1)
    counts = torch.zeros_like(trained)
    for one in packed:
        counts.index_add_(0, one.batch_rows, torch.ones_like(one.batch_rows))
    assert torch.equal(counts, trained)


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("budget", [40, 1000])
def test_lengths_alone_tell_a_rank_which_samples_it_reads(whole_groups: bool, budget: int) -> None:
    batch = make_episode_batch()
    cut = BatchCut(3, budget, None, shuffle_seed=1, whole_groups=whole_groups)
    parallel = ParallelContext()
    outline = own_rows(outline_of(batch).groups, cut, parallel, step=2)
    assert outline == own_rows(batch.groups, cut, parallel, step=2)


def test_a_turn_without_more_packs_like_an_answer() -> None:
    groups = make_batch().groups
    rows = training_rows(groups, [range(4 * g, 4 * g + 4) for g in range(len(groups))])
    as_turns = [
        replace(row, turns=rollout.turns)
        for row, rollout in zip(rows, [r for g in groups for r in g.rollouts], strict=True)
    ]
    sizes = [row.size for row in rows]
    assert [replace(row.size, paths=()) for row in as_turns] == sizes
    (plan,) = plan_micro_batches(sizes, range(len(rows)), rows_per_micro=len(rows))
    one, other = (build_micro_batch(some, plan, CPU) for some in (rows, as_turns))
    assert one is not None
    assert other is not None
    for name in (
        *("input_ids", "position_ids", "predecessors", "labels", "rows", "batch_rows"),
        *("columns", "behavior_logprobs"),
    ):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.layout.keys.index, other.layout.keys.index)
