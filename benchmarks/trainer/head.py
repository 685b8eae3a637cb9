"""Peak memory of the head that computes in blocks, over that of all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.reporting import print_line
from services.trainer.dry_run.live_bytes import LiveBytes
from sluice.algorithm.token_statistics import LinearHead, token_statistics

_TOKENS, _VOCABULARY, _HIDDEN = 2048, 32768, 512


def head() -> dict[str, Any]:
    """Return the ratio of the peaks of a forward and a backward pass, float32."""
    torch.manual_seed(0)
    hidden = torch.randn(_TOKENS, _HIDDEN, requires_grad=True)
    weight = (0.02 * torch.randn(_VOCABULARY, _HIDDEN)).requires_grad_()
    labels = torch.randint(_VOCABULARY, (_TOKENS,))

    def in_blocks() -> Tensor:
        head = LinearHead(weight)
        found = token_statistics(hidden, head, labels, with_entropy=True, entropy_gradient=True)
        assert found.entropy is not None
        return found.logprobs.sum() + found.entropy.sum()

    def at_once() -> Tensor:
        logprobs = (hidden @ weight.t()).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, labels[:, None]).sum() + entropy.sum()

    def peak(loss: Callable[[], Tensor]) -> int:
        hidden.grad = weight.grad = None
        with LiveBytes() as live:
            loss().backward()
        return live.peak

    ours, whole = peak(in_blocks), peak(at_once)
    print_line(f"head: {ours / 2**20:.0f} MiB in blocks, {whole / 2**20:.0f} MiB at once")
    return {"head_memory_ratio": round(ours / whole, 4)}
