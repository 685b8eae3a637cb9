"""Log-probabilities of given tokens, and entropies, from hidden states and a language model's head.

All describe ``softmax(logits / temperature)``, the sampling distribution before any top-p or top-k
cut. Logits exist for one block of tokens at a time, never [tokens, vocabulary]: forward keeps two
numbers a token, and backward computes the block's logits again. Their product is in the dtype of
the hidden states, all other arithmetic in float32. `LinearHead.is_wide` keeps the product float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sluice.errors import ConfigError

CPU_BLOCK_ELEMENTS = 1 << 21
"""Logits in a block: 8 MB of float32, which stays in the caches."""

DEVICE_BLOCK_ELEMENTS = 1 << 26
"""256 MB of float32: enough work for a kernel, little beside a layer's activations."""

_HALVES = frozenset({torch.bfloat16, torch.float16})

LEAST_BLOCK_TOKENS = 128
"""The backward pass adds a whole matrix of the head per block, so blocks must not be small."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenStatistics:
    """Statistics of each label's distribution, float32 [tokens].

    Attributes:
        logprobs: natural logarithm of the label's probability.
        entropy: in nats; ``None`` unless asked for.
        sum_pi_squared: sum over the vocabulary of squared probabilities, without a gradient;
            ``None`` unless asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LinearHead:
    """The last linear layer of a language model.

    Attributes:
        weight: [vocabulary, hidden].
        bias: [vocabulary].
        scale: factor on the logits that the model's family applies after this layer.
        is_wide: logits are float32 products of the weight as it is, which `widens` must support.
            Without it they are rounded to the dtype of `weight`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    is_wide: bool = False


def widens(operand: Tensor) -> bool:
    """Return whether `wide_product` takes this operand: of a half dtype, on CUDA without ROCm."""
    return operand.device.type == "cuda" and operand.dtype in _HALVES and not torch.version.hip


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product of two operands in float32, without float32 copies of them.

    Products of such numbers are exact in float32, so it differs from the product
    of copies only by the order of sums (``torch.mm`` with ``out_dtype``).

    Args:
        left, right: [n, k] and [k, m], both as `widens` wants them.
    """
    return torch.mm(left, right, out_dtype=torch.float32)


def token_statistics(
    hidden: Tensor,
    head: LinearHead,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    with_sum_pi_squared: bool = False,
    block_tokens: int | None = None,
) -> TokenStatistics:
    """Return the statistics of each label; differentiable once, in `hidden` and the head.

    Args:
        hidden: [tokens, hidden size], any float dtype; row t predicts ``labels[t]``.
        head: makes the logits; its dtype is that of `hidden`.
        labels: int64 [tokens].
        temperature: sampling temperature, > 0.
        with_entropy: return entropies.
        entropy_gradient: they have a gradient.
        with_sum_pi_squared: return sums of squared probabilities.
        block_tokens: tokens per block; by default as many as suit the device.

    Raises:
        ConfigError: temperature <= 0.
    """
    if temperature <= 0.0:
        raise ConfigError(
            f"rollout.temperature must be > 0 to train on the samples, got {temperature}"
        )
    elements = CPU_BLOCK_ELEMENTS if hidden.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    plan = _Plan(
        factor=head.scale / temperature,
        block=block_tokens or max(LEAST_BLOCK_TOKENS, elements // head.weight.shape[0]),
        entropy=with_entropy,
        entropy_gradient=with_entropy and entropy_gradient,
        squares=with_sum_pi_squared,
        is_wide=head.is_wide,
    )
    found = _HeadStatistics.apply(hidden, head.weight, head.bias, labels, plan)  # type: ignore[no-untyped-call]
    logprobs, entropy, squares = cast("tuple[Tensor, Tensor, Tensor]", found)
    return TokenStatistics(
        logprobs,
        entropy if with_entropy else None,
        squares if with_sum_pi_squared else None,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    factor: float
    block: int
    entropy: bool
    entropy_gradient: bool
    squares: bool
    is_wide: bool

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a block's scaled logits, float32 [block, vocabulary], free to be changed."""
        if self.is_wide:
            values = wide_product(hidden, weight.t())
            values = values if bias is None else values.add_(bias)
        else:
            values = torch.nn.functional.linear(hidden, weight, bias).float()
        return values if self.factor == 1.0 else values.mul_(self.factor)


class _Context(FunctionCtx):
    plan: _Plan
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


class _HeadStatistics(torch.autograd.Function):
    """With logits z, p = softmax(z) and entropy H: d log p(label) = one-hot - p, and
    dH = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        squares = torch.empty_like(logprobs)
        for start in range(0, len(labels), plan.block):
            taken = slice(start, start + plan.block)
            logits = plan.logits(hidden[taken], weight, bias)
            largest = logits.amax(-1, keepdim=True)
            shifted = logits.sub_(largest)
            own = shifted.gather(-1, labels[taken, None])[:, 0]
            exps = shifted.exp()
            total = exps.sum(-1)
            log_total = total.log()
            logprobs[taken] = own - log_total
            normaliser[taken] = largest[:, 0] + log_total
            if plan.squares:
                squares[taken] = torch.linalg.vector_norm(exps, dim=-1).div_(total).square_()
            if plan.entropy:
                # In place: `exps` and `shifted` are not needed any more.
                entropy[taken] = log_total - exps.mul_(shifted).sum(-1) / total
        saved = (hidden, weight, bias, labels, normaliser, entropy)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # torch takes None
        ctx.plan = plan
        ctx.mark_non_differentiable(squares, *(() if plan.entropy_gradient else (entropy,)))
        return logprobs, entropy, squares

    @staticmethod
    def backward(
        ctx: _Context, of_logprobs: Tensor, of_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        plan = ctx.plan
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Blocks add up in float32: bfloat16 would round away what later blocks add.
        grad_weight = _zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = _zeros_like(bias) if ctx.needs_input_grad[2] else None
        for start in range(0, len(labels), plan.block):
            taken = slice(start, start + plan.block)
            logprobs = plan.logits(hidden[taken], weight, bias).sub_(normaliser[taken, None])
            probs = logprobs.exp()
            if plan.entropy_gradient:
                slope = logprobs.add_(entropy[taken, None]).mul_(of_entropy[taken, None])
                probs.mul_(slope.add_(of_logprobs[taken, None]).neg_())
            else:
                probs.mul_(-of_logprobs[taken, None])
            probs.scatter_add_(-1, labels[taken, None], of_logprobs[taken, None])
            of_logits = probs.mul_(plan.factor) if plan.factor != 1.0 else probs
            if grad_bias is not None:
                grad_bias.add_(of_logits.sum(0))
            of_logits = of_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(of_logits, weight, out=grad_hidden[taken])
            if grad_weight is not None:
                _add_product(grad_weight, of_logits.t(), hidden[taken], is_wide=plan.is_wide)
        of_head = [
            None if one is None else one.to(weight.dtype) for one in (grad_weight, grad_bias)
        ]
        return grad_hidden, of_head[0], of_head[1], None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, is_wide: bool) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)  # without a matrix for the product
    elif is_wide:
        total.add_(wide_product(left, right))
    else:
        total.add_(left @ right)


def _zeros_like(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)
