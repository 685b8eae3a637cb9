"""Log-probabilities of given tokens, and entropies, from a language model's logits.

Both describe ``softmax(logits / temperature)``, the sampling distribution before any top-p or
top-k cut. Arithmetic is float32 for every dtype of the logits. With large vocabularies memory
decides: forward keeps only the logits, and backward computes the softmax again, one block of rows
at a time. The gradient, in the dtype of the logits, is the only other full-size tensor.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.autograd.function import FunctionCtx

from sluice.errors import ConfigError

CPU_BLOCK_ELEMENTS = 1 << 21
"""8 MB of float32. On a 2-core machine, forward and backward of 512 rows of a vocabulary of 32,000
took 31 ms of CPU in such blocks against 60 ms in one pass of autograd. At 8,192 rows of 369, where
everything fits in cache, computing the softmax twice costs 7 ms against 5 ms."""

DEVICE_BLOCK_ELEMENTS = 1 << 26
"""256 MB of float32: enough work for a kernel, little compared with the logits."""


def logprobs_from_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    *,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Return the natural-log probability of each label.

    Args:
        logits: float [tokens, vocab], any float dtype; row t predicts ``labels[t]``.
        labels: int64 [tokens].
        temperature: sampling temperature, > 0.
        chunk_rows: rows per block; by default as many as suit the device.

    Returns:
        float32 [tokens]; differentiable once, in `logits`.

    Raises:
        ConfigError: temperature <= 0.
    """
    rows = _block_rows(logits, temperature, chunk_rows)
    found = _LabelLogprobs.apply(logits, labels, temperature, rows, False)  # type: ignore[no-untyped-call]
    return cast("tuple[torch.Tensor, torch.Tensor]", found)[0]


def logprobs_and_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    *,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `logprobs_from_logits`, and the entropies without a gradient, by one softmax.

    Args:
        logits: float [tokens, vocab], finite.
        labels: int64 [tokens].
        temperature: sampling temperature, > 0.
        chunk_rows: rows per block; by default as many as suit the device.

    Returns:
        float32 [tokens] each; only the log probabilities are differentiable.

    Raises:
        ConfigError: temperature <= 0.
    """
    rows = _block_rows(logits, temperature, chunk_rows)
    found = _LabelLogprobs.apply(logits, labels, temperature, rows, True)  # type: ignore[no-untyped-call]
    return cast("tuple[torch.Tensor, torch.Tensor]", found)


def entropy_from_logits(
    logits: torch.Tensor, temperature: float = 1.0, *, chunk_rows: int | None = None
) -> torch.Tensor:
    """Return the entropy of each row's distribution in nats.

    Args:
        logits: float [tokens, vocab], finite.
        temperature: sampling temperature, > 0.
        chunk_rows: rows per block; by default as many as suit the device.

    Returns:
        float32 [tokens]; differentiable once.

    Raises:
        ConfigError: temperature <= 0.
    """
    rows = _block_rows(logits, temperature, chunk_rows)
    entropy = _RowEntropy.apply(logits, temperature, rows)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", entropy)


def _block_rows(logits: torch.Tensor, temperature: float, chunk_rows: int | None) -> int:
    if temperature <= 0.0:
        raise ConfigError(
            f"rollout.temperature must be > 0 to train on the samples, got {temperature}"
        )
    if chunk_rows is not None:
        return chunk_rows
    elements = CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    return max(1, elements // logits.shape[-1])


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    values = logits.float()
    return values if temperature == 1.0 else values / temperature


def _entropy_of(logprobs: torch.Tensor) -> torch.Tensor:
    """-sum p log p of each row, [rows] of [rows, vocab]."""
    return -(logprobs.exp() * logprobs).sum(dim=-1)


class _Context(FunctionCtx):
    """Values that both functions keep from forward to backward."""

    temperature: float
    rows: int
    saved_tensors: tuple[torch.Tensor, ...]


class _LabelLogprobs(torch.autograd.Function):
    """log p(label); gradient in the logits: (one-hot - p) / temperature. Entropies if asked."""

    @staticmethod
    def forward(
        ctx: _Context,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        rows: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        for start in range(0, len(labels), rows):
            taken = slice(start, start + rows)
            normalised = torch.log_softmax(_scaled(logits[taken], temperature), dim=-1)
            logprobs[taken] = normalised.gather(-1, labels[taken, None])[:, 0]
            if with_entropy:
                entropy[taken] = _entropy_of(normalised)
        ctx.save_for_backward(logits, labels)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: _Context, grad_logprobs: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        blocks = zip(
            logits.split(ctx.rows),
            labels.split(ctx.rows),
            (grad_logprobs / ctx.temperature).split(ctx.rows),
            grad_logits.split(ctx.rows),
            strict=True,
        )
        for block, label, grad, out in blocks:
            probs = torch.softmax(_scaled(block, ctx.temperature), dim=-1)
            probs.mul_(-grad[:, None]).scatter_add_(-1, label[:, None], grad[:, None])
            out.copy_(probs)
        return grad_logits, None, None, None, None


class _RowEntropy(torch.autograd.Function):
    """H = -sum p log p; gradient in the logits: -p (log p + H) / temperature."""

    @staticmethod
    def forward(ctx: _Context, logits: torch.Tensor, temperature: float, rows: int) -> torch.Tensor:
        entropy = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        for block, out in zip(logits.split(rows), entropy.split(rows), strict=True):
            logprobs = torch.log_softmax(_scaled(block, temperature), dim=-1)
            out.copy_(_entropy_of(logprobs))
        ctx.save_for_backward(logits, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        return entropy

    @staticmethod
    def backward(ctx: _Context, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        blocks = zip(
            logits.split(ctx.rows),
            entropy.split(ctx.rows),
            (grad_entropy / ctx.temperature).split(ctx.rows),
            grad_logits.split(ctx.rows),
            strict=True,
        )
        for block, row_entropy, grad, out in blocks:
            logprobs = torch.log_softmax(_scaled(block, ctx.temperature), dim=-1)
            probs = logprobs.exp()
            slope = probs.mul_(logprobs.add_(row_entropy[:, None]))
            out.copy_(slope.mul_(-grad[:, None]))
        return grad_logits, None, None
