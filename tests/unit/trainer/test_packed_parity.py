"""Packed tokens give the logprobs and gradients of the plain model, row by row."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.learner.batch import micro_batch
from services.trainer.learner.batch.micro_batch import MicroBatch, build_micro_batch
from services.trainer.learner.batch.packed_rows import TrainingRow, training_rows
from services.trainer.learner.model import attention
from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.forward import TokenPass, check_packing, token_outputs
from services.trainer.learner.update.loss import first_of_rows
from sluice.algorithm.packing import plan_micro_batches
from sluice.errors import ConfigError
from tests.support.tiny_policy import make_group, make_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEMPERATURE = 0.7
CALLS: list[torch.Size] = []
LENGTHS = [(1, 16, 3, 7), (2, 2, 9, 1), (16, 15, 14, 13)]


def rows() -> list[TrainingRow]:
    groups = [make_group(seed, lengths) for seed, lengths in enumerate(LENGTHS)]
    return training_rows(groups, [range(4 * g, 4 * g + 4) for g in range(len(groups))])


def pack(some: list[TrainingRow]) -> MicroBatch:
    (plan,) = plan_micro_batches(
        [row.size for row in some], range(len(some)), rows_per_micro=len(some)
    )
    micro_batch = build_micro_batch(some, plan, torch.device("cpu"))
    assert micro_batch is not None
    assert micro_batch.row_indices == tuple(range(len(some)))
    return micro_batch


def weights_of_tokens(num_tokens: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, num_tokens)


def plain_logprobs(model: PreTrainedModel, row: TrainingRow) -> torch.Tensor:
    tokens = np.concatenate([row.prompt_token_ids, row.token_ids]).astype(np.int64)
    logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    prompt = row.prompt_token_ids.size
    logprobs = (logits[prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(tokens[prompt:, None]))[:, 0]


def gradients(model: PreTrainedModel, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * weights_of_tokens(logprobs.numel())).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_against_plain(family: str) -> None:
    model = make_model(family)
    plain = torch.cat([plain_logprobs(model, row) for row in rows()])
    expected = gradients(model, plain)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = token_outputs(model, TokenPass(pack(rows()), TEMPERATURE)).logprobs
    found = gradients(model, packed)
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "granite", "gpt_neox"])
def test_logprobs_and_gradients_equal_the_plain_models(family: str) -> None:
    check_against_plain(family)


def test_sequences_of_very_different_length_in_blocks_of_their_own_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(micro_batch, "MIN_BLOCK_TOKENS", 0)
    assert len(pack(rows()).layout.blocks) > 4
    check_against_plain("qwen3")


def test_blocks_too_large_for_a_mask_are_causal_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(micro_batch, "MAX_MASK_ELEMENTS", 0)
    assert all(block.prompt_visible is None for block in pack(rows()).layout.blocks)
    check_against_plain("llama")


def attend_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What the kernel does on a GPU: sequence by sequence, causal from the last key backwards."""
    assert window_size == (-1, 0)
    CALLS.append(query.shape)
    outputs = []
    for (start, stop), (first, last) in zip(
        pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        queries, keys = stop - start, last - first
        assert queries <= longest_query
        assert keys <= longest_key
        q, k, v = query[start:stop], key[first:last], value[first:last]
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        heads = (one.transpose(0, 1) for one in (q, k, v))
        attended = scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=scale, enable_gqa=True
        )
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


def use_ragged_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "has_ragged_kernel", lambda device: True)
    monkeypatch.setattr(attention, "RAGGED_DTYPES", {torch.float32})
    monkeypatch.setattr(attention, "varlen_attn", attend_each)
    monkeypatch.setattr(attention, "_VARLEN_OPTIONS", {"window_size"})


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "granite"])
def test_a_kernel_for_sequences_end_to_end_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    use_ragged_kernel(monkeypatch)
    CALLS.clear()
    check_against_plain(family)
    assert len(CALLS) == make_model(family).config.num_hidden_layers


def test_a_prompt_is_computed_once_for_all_its_rows() -> None:
    prompts = {row.group: row.prompt_token_ids.size for row in rows()}
    # The last token of a response is a label only.
    inputs = sum(row.token_ids.size - 1 for row in rows())
    assert pack(rows()).input_ids.shape == (1, sum(prompts.values()) + inputs)


def test_an_empty_response_is_a_row_without_tokens() -> None:
    group = make_group(0, (3, 0, 2, 0))
    some = training_rows([group], [range(10, 14)])
    (plan,) = plan_micro_batches([row.size for row in some], range(4), rows_per_micro=4)
    micro_batch = build_micro_batch(some, plan, torch.device("cpu"))
    assert micro_batch is not None
    assert micro_batch.row_indices == (0, 1, 2, 3)
    assert micro_batch.rows.tolist() == [0] * 3 + [2] * 2
    assert micro_batch.batch_rows.tolist() == [10] * 3 + [12] * 2
    assert micro_batch.columns.tolist() == [0, 1, 2, 0, 1]


def test_nothing_but_empty_responses_is_no_micro_batch() -> None:
    some = training_rows([make_group(0, (0, 0))], [range(2)])
    (plan,) = plan_micro_batches([row.size for row in some], range(2), rows_per_micro=2)
    assert build_micro_batch(some, plan, torch.device("cpu")) is None


def test_a_family_that_ignores_the_packing_is_refused() -> None:
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot be trained on packed tokens"):
        check_packing(make_model("bloom"))


def test_a_sliding_window_shorter_than_a_sequence_is_refused() -> None:
    model = make_model("mistral", sliding_window=8)
    model.set_attn_implementation(PACKED_ATTENTION)
    with pytest.raises(ConfigError, match="MistralAttention uses sliding_window"):
        token_outputs(model, TokenPass(pack(rows())))


def test_the_value_of_a_row_is_that_of_its_first_token() -> None:
    some = training_rows([make_group(0, (3, 0, 1))], [range(3)])
    (plan,) = plan_micro_batches([row.size for row in some], range(3), rows_per_micro=3)
    micro_batch = build_micro_batch(some, plan, torch.device("cpu"))
    assert micro_batch is not None
    values = torch.tensor([5.0, 6.0, 7.0, 8.0])
    assert first_of_rows(values, micro_batch).tolist() == [5.0, 0.0, 8.0]
