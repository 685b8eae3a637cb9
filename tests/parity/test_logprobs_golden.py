"""Entropy and log-probabilities against the reference number and transformers-style formulas."""

from __future__ import annotations

import pytest
import torch

from sluice.algorithm.token_statistics import LinearHead, token_statistics


def test_entropy_equals_verls() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found = token_statistics(logits, LinearHead(torch.eye(3)), torch.tensor([0]), with_entropy=True)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(0.832396, abs=1e-6)


def test_logprob_equals_minus_cross_entropy_in_float64() -> None:
    logits = torch.randn(50, 369, generator=torch.Generator().manual_seed(1)) * 5
    labels = torch.arange(50)
    found = token_statistics(logits, LinearHead(torch.eye(369)), labels, temperature=0.6).logprobs
    expected = -torch.nn.functional.cross_entropy(logits.double() / 0.6, labels, reduction="none")
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)
