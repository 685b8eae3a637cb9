"""Log-probabilities of given tokens, and entropies, from hidden states and a language model's head.

All describe ``softmax(logits / temperature)``, the sampling distribution before any top-p or top-k
cut. Logits exist for one block of tokens at a time, never [tokens, vocabulary]: forward keeps two
numbers a token, and backward computes the block's logits again. Their product is in the dtype of
the hidden states, all other arithmetic in float32. `LinearHead.is_wide` keeps the product float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sluice.errors import ConfigError

CPU_BLOCK_ELEMENTS = 1 << 21
"""Logits in a block: 8 MB of float32, which stays in the caches."""

DEVICE_BLOCK_ELEMENTS = 1 << 26
"""256 MB of float32: enough work for a kernel, little beside a layer's activations."""

COMPILED_BLOCK_BYTES = 1 << 29
"""512 MB of logits; their gradients take as much again, and compiled code makes no copies."""

F = TypeVar("F", bound=Callable[..., object])

_HALVES = frozenset({torch.bfloat16, torch.float16})

MIN_BLOCK_TOKENS = 128
"""The backward pass adds a whole matrix of the head per block, so blocks must not be small. Their
sizes are multiples of it, as products of matrices want.
"""


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
class VocabularyPart:
    """A rank's rows of the head, if ranks divide the vocabulary.

    Attributes:
        first: token id of the first row.
        max_rows: rows of the rank with the most rows.
        maximum: replaces each element of a tensor by its largest value on any rank.
        total: replaces each element of a tensor by its sum over ranks.
    """

    first: int
    max_rows: int
    maximum: Callable[[Tensor], None]
    total: Callable[[Tensor], None]

    def rows(self, labels: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return the local rows of labels (0 for labels of other ranks), and which labels are
        local.

        Args:
            labels: int64 [block].
            number: number of this rank's rows.
        """
        rows = labels - self.first
        is_here = (rows >= 0) & (rows < number)
        return rows.where(is_here, 0), is_here


@dataclass(frozen=True, slots=True, eq=False)
class LinearHead:
    """The last linear layer of a language model.

    Attributes:
        weight: [vocabulary, hidden].
        bias: [vocabulary].
        scale: factor on the logits that the model's family applies after this layer.
        is_wide: logits are float32 products of the weight as it is, which `widens` must support.
            Without it they are rounded to the dtype of `weight`.
        is_compiled: compile the arithmetic on logits, which takes seconds once.
        part: the place of the rows of `weight` and `bias`; ``None``: they are all.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    is_wide: bool = False
    is_compiled: bool = False
    part: VocabularyPart | None = None


def widens(operand: Tensor) -> bool:
    """Return whether `wide_product` takes this operand: of a half dtype, on CUDA without ROCm."""
    return operand.device.type == "cuda" and is_half(operand) and not torch.version.hip


def is_half(operand: Tensor) -> bool:
    """Return whether the dtype is bfloat16 or float16."""
    return operand.dtype in _HALVES


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product of two operands in float32, without float32 copies of them.

    Products of such numbers are exact in float32, so it differs from the product
    of copies only by the order of sums (``torch.mm`` with ``out_dtype``).

    Args:
        left, right: [n, k] and [k, m], both as `widens` wants them.
    """
    return torch.mm(left, right, out_dtype=torch.float32)


_COMPILED: dict[Callable[..., object], Callable[..., object]] = {}


def compile_once(function: F) -> F:
    """Return ``torch.compile`` of a function, the same one each time."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return cast("F", _COMPILED[function])


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
        block_tokens: tokens per block; by default as many as suit the device.

    Raises:
        ConfigError: temperature <= 0.
    """
    if temperature <= 0.0:
        raise ConfigError(
            f"rollout.temperature must be > 0 to train on the samples, got {temperature}"
        )
    if hidden.device.type == "cpu":
        elements = CPU_BLOCK_ELEMENTS
    elif head.is_compiled:
        elements = COMPILED_BLOCK_BYTES // (4 if head.is_wide else head.weight.itemsize)
    else:
        elements = DEVICE_BLOCK_ELEMENTS
    rows = head.part.max_rows if head.part else head.weight.shape[0]  # all ranks make equal blocks
    block_that_fits = elements // rows // MIN_BLOCK_TOKENS * MIN_BLOCK_TOKENS
    plan = _Plan(
        factor=head.scale / temperature,
        block=block_tokens or max(MIN_BLOCK_TOKENS, block_that_fits),
        entropy=with_entropy,
        entropy_gradient=with_entropy and entropy_gradient,
        squares=with_sum_pi_squared,
        is_wide=head.is_wide,
        is_compiled=head.is_compiled,
        part=head.part,
    )
    outputs = _HeadStatistics.apply(hidden, head.weight, head.bias, labels, plan)  # type: ignore[no-untyped-call]
    logprobs, entropy, squares = cast("tuple[Tensor, Tensor, Tensor]", outputs)
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
    is_compiled: bool
    part: VocabularyPart | None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a block's logits [block, vocabulary] before they are scaled."""
        if not self.is_wide:
            return torch.nn.functional.linear(hidden, weight, bias)
        values = wide_product(hidden, weight.t())
        return values if bias is None else values.add_(bias)


class _SavedForBackward(FunctionCtx):
    plan: _Plan
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


def _scale_logits(logits: Tensor, factor: float) -> Tensor:
    """Return scaled logits in float32, free to be changed."""
    if torch.compiler.is_compiling():  # a changed input would be written
        return logits.float() * factor
    values = logits.float()
    return values if factor == 1.0 else values.mul_(factor)


def _statistics(
    logits: Tensor,
    labels: Tensor,
    factor: float,
    *,
    with_entropy: bool,
    with_squares: bool,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return logprobs, normalisers, entropies and sums of squares of a block, [block] each.

    Args:
        logits: [block, vocabulary]; may be changed.
        part: of the vocabulary, where ranks divide it; then the call is collective.
    """
    values = _scale_logits(logits, factor)
    largest = values.amax(-1)
    if part is not None:
        part.maximum(largest)
    shifted = values.sub_(largest[:, None])
    if part is None:
        label_logits = shifted.gather(-1, labels[:, None])[:, 0]
    else:
        rows, is_here = part.rows(labels, logits.shape[1])
        label_logits = shifted.gather(-1, rows[:, None])[:, 0] * is_here
    exps = shifted.exp()
    sums = [exps.sum(-1), label_logits]
    if with_squares:
        sums.append(torch.linalg.vector_norm(exps, dim=-1).square_())
    if with_entropy:
        # In place: `exps` and `shifted` are not needed any more.
        sums.append(exps.mul_(shifted).sum(-1))
    if part is not None:
        stacked_sums = torch.stack(sums)
        part.total(stacked_sums)
        sums = list(stacked_sums.unbind())
    total, label_logits, *other_sums = sums
    log_total = total.log()
    squares = other_sums[0] / total.square() if with_squares else None
    entropy = log_total - other_sums[-1] / total if with_entropy else None
    return label_logits - log_total, largest + log_total, entropy, squares


def _slopes(
    logits: Tensor,
    label_values: Sequence[Tensor],
    factor: float,
    dtype: torch.dtype,
    *,
    of_entropies: bool,
    with_bias: bool,
    is_here: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a block's logits, in a dtype, and of the bias in float32.

    Args:
        logits: [block, vocabulary]; may be changed.
        label_values: [block] each: labels, normalisers, entropies, and the gradients of logprobs
            and of entropies.
        is_here: bool [block], which labels are among this rank's logits; ``None``: all.
    """
    labels = label_values[0]
    normaliser, entropy, of_logprobs, of_entropy = (
        label_value[:, None] for label_value in label_values[1:]
    )

    def unlabelled(logprobs: Tensor) -> Tensor:
        """Return the slopes of logits that are not their token's label, and change `logprobs`."""
        slopes = logprobs.exp()
        if of_entropies:
            entropy_slopes = logprobs.add_(entropy).mul_(of_entropy)
            return slopes.mul_(entropy_slopes.add_(of_logprobs).mul_(-factor))
        return slopes.mul_(of_logprobs * -factor)

    logprobs, label_columns = _scale_logits(logits, factor).sub_(normaliser), labels[:, None]
    of_own = of_logprobs * factor
    if is_here is not None:
        of_own = of_own * is_here[:, None]
    # Added before it is rounded: of a likely label's slope nearly all cancels.
    of_label = unlabelled(logprobs.gather(-1, label_columns)).add_(of_own)
    slopes = unlabelled(logprobs)
    of_bias = slopes.sum(0).index_add_(0, labels, of_own[:, 0]) if with_bias else None
    return slopes.to(dtype).scatter_(-1, label_columns, of_label.to(dtype)), of_bias


class _HeadStatistics(torch.autograd.Function):
    """With logits z, p = softmax(z) and entropy H: d log p(label) = one-hot - p, and
    dH = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: _SavedForBackward,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        squares = torch.empty_like(logprobs)
        compute: Callable[..., Sequence[Tensor | None]] = _statistics
        if plan.part is not None:
            compute = partial(_statistics, part=plan.part)
        elif plan.is_compiled:
            compute = compile_once(_statistics)
        for start in range(0, len(labels), plan.block):
            block_rows = slice(start, start + plan.block)
            block = compute(
                plan.logits(hidden[block_rows], weight, bias),
                labels[block_rows],
                plan.factor,
                with_entropy=plan.entropy,
                with_squares=plan.squares,
            )
            for output, part in zip((logprobs, normaliser, entropy, squares), block, strict=True):
                if part is not None:
                    output[block_rows] = part
        saved = (hidden, weight, bias, labels, normaliser, entropy)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # torch takes None
        ctx.plan = plan
        ctx.mark_non_differentiable(squares, *(() if plan.entropy_gradient else (entropy,)))
        return logprobs, entropy, squares

    @staticmethod
    def backward(
        ctx: _SavedForBackward, of_logprobs: Tensor, of_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, labels, normaliser, entropy = ctx.saved_tensors
        plan = ctx.plan
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Blocks add up in float32: bfloat16 would round away what later blocks add.
        grad_weight = _zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = _zeros_like(bias) if ctx.needs_input_grad[2] else None
        compute = compile_once(_slopes) if plan.is_compiled else _slopes
        is_here: Tensor | None = None
        if plan.part is not None:
            labels, is_here = plan.part.rows(labels, weight.shape[0])
        for start in range(0, len(labels), plan.block):
            block_rows = slice(start, start + plan.block)
            of_logits, of_bias = compute(
                plan.logits(hidden[block_rows], weight, bias),
                [
                    label_value[block_rows]
                    for label_value in (labels, normaliser, entropy, of_logprobs, of_entropy)
                ],
                plan.factor,
                hidden.dtype,
                of_entropies=plan.entropy_gradient,
                with_bias=grad_bias is not None,
                is_here=None if is_here is None else is_here[block_rows],
            )
            if grad_bias is not None and of_bias is not None:
                grad_bias.add_(of_bias)
            if grad_hidden is not None:
                torch.mm(of_logits, weight, out=grad_hidden[block_rows])
            if grad_weight is not None:
                _add_product(grad_weight, of_logits.t(), hidden[block_rows])
            del of_logits  # or it would be there beside the next block
        of_head = [
            None if gradient is None else gradient.to(weight.dtype)
            for gradient in (grad_weight, grad_bias)
        ]
        return grad_hidden, of_head[0], of_head[1], None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices to a float32 one, without a matrix for the product if possible."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif widens(left):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def _zeros_like(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.float32)
