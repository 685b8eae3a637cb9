"""Log-probabilities and entropies: values, gradients, blocks, dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sluice.algorithm.entropy import (
    entropy_from_logits,
    logprobs_and_entropy,
    logprobs_from_logits,
)
from sluice.errors import ConfigError

LABELS = torch.tensor([0, 4, 2, 2, 1, 3, 0])


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(7, 5, generator=generator) * 4).to(dtype).requires_grad_()


def plain_logprobs(values: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = torch.log_softmax(values.double() / temperature, dim=-1)
    return scaled.gather(-1, LABELS[:, None])[:, 0]


def plain_entropy(values: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = values.double() / temperature
    weighted = (torch.softmax(scaled, dim=-1) * scaled).sum(dim=-1)
    return torch.logsumexp(scaled, dim=-1) - weighted


def chunked_logprobs(values: torch.Tensor, temperature: float, rows: int | None) -> torch.Tensor:
    return logprobs_from_logits(values, LABELS, temperature, chunk_rows=rows)


def chunked_entropy(values: torch.Tensor, temperature: float, rows: int | None) -> torch.Tensor:
    return entropy_from_logits(values, temperature, chunk_rows=rows)


Plain = Callable[[torch.Tensor, float], torch.Tensor]
Chunked = Callable[[torch.Tensor, float, int | None], torch.Tensor]
PAIRS = [(plain_logprobs, chunked_logprobs), (plain_entropy, chunked_entropy)]


@pytest.mark.parametrize(("plain", "chunked"), PAIRS)
@pytest.mark.parametrize("rows", [1, 3, 7, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_plain_formula(
    plain: Plain, chunked: Chunked, rows: int | None, temperature: float
) -> None:
    weights = torch.arange(1.0, 8.0)
    expected, found = logits(), logits()
    (plain(expected, temperature) * weights).sum().backward()
    (chunked(found, temperature, rows) * weights).sum().backward()
    value = chunked(found, temperature, rows)
    torch.testing.assert_close(value.double(), plain(expected, temperature), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 7, None])
def test_logprobs_and_entropies_of_one_softmax_are_those_of_two(rows: int | None) -> None:
    apart, together = logits(), logits()
    expected = chunked_logprobs(apart, 0.6, rows)
    logprobs, entropies = logprobs_and_entropy(together, LABELS, 0.6, chunk_rows=rows)
    assert torch.equal(logprobs, expected)
    assert torch.equal(entropies, chunked_entropy(apart, 0.6, rows))
    assert not entropies.requires_grad
    expected.sum().backward()
    logprobs.sum().backward()
    assert torch.equal(together.grad, apart.grad)


@pytest.mark.parametrize(("plain", "chunked"), PAIRS)
def test_bfloat16_logits_are_computed_in_float32(plain: Plain, chunked: Chunked) -> None:
    values = logits(torch.bfloat16)
    found = chunked(values, 1.0, 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), plain(values, 1.0), atol=1e-6, rtol=1e-5)
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("function", [chunked_logprobs, chunked_entropy])
def test_analytic_gradients_equal_finite_differences(function: Chunked) -> None:
    values = logits().detach()
    step = 1e-2
    grid = values.clone().requires_grad_()
    function(grid, 0.8, 2).sum().backward()
    assert grid.grad is not None
    for position in ((0, 0), (3, 2), (6, 4)):
        moved = torch.zeros_like(values)
        moved[position] = step
        above, below = (
            function(values + moved, 0.8, 2).sum(),
            function(values - moved, 0.8, 2).sum(),
        )
        slope = (above - below).item() / (2 * step)
        assert grid.grad[position].item() == pytest.approx(slope, abs=2e-3)


def test_the_logits_are_left_as_they_were() -> None:
    values = logits()
    before = values.detach().clone()
    (chunked_logprobs(values, 1.0, 2) + chunked_entropy(values, 1.0, 2)).sum().backward()
    assert torch.equal(values.detach(), before)


def test_large_logits_do_not_overflow() -> None:
    values = torch.tensor([[1e4, 0.0, -1e4]])
    assert logprobs_from_logits(values, torch.tensor([0])).item() == 0.0
    assert entropy_from_logits(values).item() == 0.0


def test_no_tokens_have_no_logprobs() -> None:
    nothing = torch.zeros(0, 5)
    assert logprobs_from_logits(nothing, torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert entropy_from_logits(nothing).shape == (0,)


@pytest.mark.parametrize("function", [chunked_logprobs, chunked_entropy])
def test_a_temperature_of_zero_is_refused(function: Chunked) -> None:
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        function(logits(), 0.0, None)


def test_backward_keeps_nothing_but_the_logits_and_one_number_a_token() -> None:
    values = logits(torch.bfloat16)
    for function in (chunked_logprobs, chunked_entropy):
        node = function(values, 0.7, 2).grad_fn
        assert node is not None
        saved = node.saved_tensors  # type: ignore[attr-defined]
        assert [tensor.data_ptr() for tensor in saved if tensor.ndim == 2] == [values.data_ptr()]
        assert all(tensor.ndim == 1 for tensor in saved[1:])
