"""Log-probabilities, entropies and squared probabilities of a head: values, gradients, blocks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice.algorithm import token_statistics as head_statistics
from sluice.algorithm.token_statistics import (
    LinearHead,
    TokenStatistics,
    token_statistics,
    widens,
)
from sluice.errors import ConfigError

TOKENS, HIDDEN, VOCABULARY = 7, 4, 5
LABELS = torch.tensor([0, 4, 2, 2, 1, 3, 0])
BLOCKS = [1, 3, 7, None]
_MM = torch.mm


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(5)
    sizes = ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    made = [torch.randn(*size, generator=generator) * 2 for size in sizes]
    return [one.to(dtype).requires_grad_() for one in made]


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = (hidden.double() @ weight.double().t() + bias.double()) * factor
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    own = logprobs.gather(-1, LABELS[:, None])[:, 0]
    return own, -(probs * logprobs).sum(-1), probs.square().sum(-1)


def blocked(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, block: int | None = 2, **wanted: float
) -> TokenStatistics:
    scale, temperature = wanted.get("scale", 1.0), wanted.get("temperature", 1.0)
    return token_statistics(
        hidden,
        LinearHead(weight, bias, scale),
        LABELS,
        temperature,
        with_entropy=True,
        entropy_gradient=True,
        with_sum_pi_squared=True,
        block_tokens=block,
    )


def total(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    return (logprobs * torch.arange(1.0, 8.0)).sum() + (entropy * torch.arange(7.0, 0.0, -1)).sum()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (1.0, 0.6), (2.5, 0.6)])
def test_values_and_gradients_equal_the_plain_formula(
    block: int | None, scale: float, temperature: float
) -> None:
    expected, found = inputs(), inputs()
    logprobs, entropy, squares = plain(*expected, scale / temperature)
    value = blocked(*found, block=block, scale=scale, temperature=temperature)
    assert value.entropy is not None
    assert value.sum_pi_squared is not None
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(value.logprobs.double(), logprobs, **close)
    torch.testing.assert_close(value.entropy.double(), entropy, **close)
    torch.testing.assert_close(value.sum_pi_squared.double(), squares, **close)
    total(logprobs, entropy).backward()
    total(value.logprobs, value.entropy).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at inputs
def test_compiled_blocks_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is captured is the rule here, and kernels take seconds to build.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(head_statistics, "_COMPILED", {})
    expected, found = inputs(torch.bfloat16), inputs(torch.bfloat16)
    values = [
        token_statistics(
            hidden,
            LinearHead(weight, bias, scale=2.5, is_compiled=is_compiled),
            LABELS,
            with_entropy=True,
            entropy_gradient=True,
            with_sum_pi_squared=True,
            block_tokens=3,
        )
        for is_compiled, (hidden, weight, bias) in ((False, expected), (True, found))
    ]
    for name in ("logprobs", "entropy", "sum_pi_squared"):
        torch.testing.assert_close(getattr(values[1], name), getattr(values[0], name))
    for one in values:
        total(one.logprobs, one.entropy).backward()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_entropy_for_a_metric_has_no_gradient_and_changes_none() -> None:
    shown, hidden = inputs(), inputs()
    found = token_statistics(shown[0], LinearHead(shown[1]), LABELS, with_entropy=True)
    assert found.entropy is not None
    assert not found.entropy.requires_grad
    assert found.sum_pi_squared is None
    found.logprobs.sum().backward()
    token_statistics(hidden[0], LinearHead(hidden[1]), LABELS).logprobs.sum().backward()
    assert torch.equal(shown[0].grad, hidden[0].grad)
    assert torch.equal(shown[1].grad, hidden[1].grad)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _ = inputs()
    found = token_statistics(hidden, LinearHead(weight.detach()), LABELS)
    found.logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    hidden, weight, bias = inputs(torch.bfloat16)
    found = blocked(hidden, weight, bias)
    assert found.logprobs.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    expected = logits.log_softmax(-1).gather(-1, LABELS[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, expected, atol=1e-6, rtol=1e-5)
    total(found.logprobs, found.entropy).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_blocks_of_a_bfloat16_head_add_up_in_float32() -> None:
    tokens = 512
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    found = token_statistics(hidden, LinearHead(weight), labels, block_tokens=1)
    found.logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[0].item() == tokens / 2


def _mm_of_a_gpu(left: Tensor, right: Tensor, **options: Any) -> Tensor:
    """``torch.mm`` with what only CUDA has of it."""
    if options.pop("out_dtype", None) is None:
        return _MM(left, right, **options)
    assert left.dtype == right.dtype == torch.bfloat16
    return _MM(left.float(), right.float())


def test_a_wide_head_rounds_neither_logits_nor_what_blocks_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "mm", _mm_of_a_gpu)
    hidden, weight, bias = inputs(torch.bfloat16)
    found = token_statistics(
        hidden, LinearHead(weight, bias, is_wide=True), LABELS, block_tokens=2
    ).logprobs
    found.sum().backward()
    copies = [one.detach().float().requires_grad_() for one in (hidden, weight, bias)]
    expected = token_statistics(copies[0], LinearHead(*copies[1:]), LABELS).logprobs
    expected.sum().backward()
    torch.testing.assert_close(found, expected)
    rounded = token_statistics(hidden, LinearHead(weight, bias), LABELS).logprobs
    assert (rounded - expected).abs().max() > 100 * (found - expected).abs().max()
    for one, copy in zip((hidden, weight, bias), copies, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, copy.grad, rtol=2**-7, atol=2e-2, check_dtype=False)


def test_products_are_widened_on_cuda_and_of_halves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(kind: str, dtype: torch.dtype) -> Any:
        return SimpleNamespace(device=torch.device(kind), dtype=dtype)

    assert widens(of("cuda", torch.bfloat16))
    assert not widens(of("cuda", torch.float32))
    assert not widens(of("cpu", torch.bfloat16))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not widens(of("cuda", torch.bfloat16))


def test_the_inputs_are_left_as_they_were() -> None:
    values = inputs()
    before = [one.detach().clone() for one in values]
    found = blocked(*values, temperature=0.7)
    total(found.logprobs, found.entropy).backward()
    for one, other in zip(values, before, strict=True):
        assert torch.equal(one.detach(), other)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4, 0.0, -1e4]])
    found = token_statistics(hidden, LinearHead(torch.eye(3)), torch.tensor([0]), with_entropy=True)
    assert found.entropy is not None
    assert (found.logprobs.item(), found.entropy.item()) == (0.0, 0.0)


def test_no_tokens_have_no_logprobs() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    found = token_statistics(torch.zeros(0, 4), LinearHead(torch.zeros(5, 4)), nothing)
    assert found.logprobs.shape == (0,)


def test_a_temperature_of_zero_is_refused() -> None:
    hidden, weight, _ = inputs()
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        token_statistics(hidden, LinearHead(weight), LABELS, 0.0)


def test_backward_keeps_two_numbers_a_token_beside_hidden_states_and_head() -> None:
    hidden, weight, bias = inputs()
    node = blocked(hidden, weight, bias).logprobs.grad_fn
    assert node is not None
    saved = node.saved_tensors  # type: ignore[attr-defined]
    held = {one.data_ptr() for one in (hidden, weight, bias, LABELS)}
    made = [tensor for tensor in saved if tensor.data_ptr() not in held]
    assert [tensor.shape for tensor in made] == [(TOKENS,), (TOKENS,)]
