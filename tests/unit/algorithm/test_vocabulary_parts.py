"""Statistics of a head whose vocabulary ranks divide are those of the whole head."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from sluice.algorithm.token_statistics import (
    LinearHead,
    TokenStatistics,
    VocabularyPart,
    token_statistics,
)
from tests.unit.algorithm.test_token_statistics import LABELS, VOCABULARY, inputs, total

MOST = 3
"""Rows of the first rank of two; the second has two."""
TIMEOUT_S = 30.0


class Board:
    """Reductions over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._values: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks)

    def part(self, rank: int) -> VocabularyPart:
        def reduced(by: Callable[[Tensor], Tensor], values: Tensor) -> None:
            self._values[rank] = values.clone()
            self._barrier.wait(TIMEOUT_S)
            values.copy_(by(torch.stack(self._values)))
            self._barrier.wait(TIMEOUT_S)

        return VocabularyPart(
            rank * MOST,
            MOST,
            lambda values: reduced(lambda every: every.amax(0), values),
            lambda values: reduced(lambda every: every.sum(0), values),
        )


def statistics(hidden: Tensor, head: LinearHead) -> TokenStatistics:
    return token_statistics(
        hidden,
        head,
        LABELS,
        0.6,
        with_entropy=True,
        entropy_gradient=True,
        with_sum_pi_squared=True,
        block_tokens=2,
    )


def test_values_are_the_whole_heads_on_every_rank_and_gradients_add_up_to_its() -> None:
    hidden, weight, bias = inputs()
    whole = statistics(hidden, LinearHead(weight, bias))
    total(whole.logprobs, whole.entropy).backward()
    board = Board(2)

    def run(rank: int) -> tuple[TokenStatistics, list[Tensor]]:
        rows = slice(rank * MOST, min(VOCABULARY, (rank + 1) * MOST))
        own = [one.detach().clone() for one in (hidden, weight[rows], bias[rows])]
        for one in own:
            one.requires_grad_()
        found = statistics(own[0], LinearHead(own[1], own[2], part=board.part(rank)))
        total(found.logprobs, found.entropy).backward()
        return found, [one.grad for one in own if one.grad is not None]

    with ThreadPoolExecutor(2) as threads:
        parts = list(threads.map(run, range(2)))
    for found, _ in parts:
        for name in ("logprobs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(getattr(found, name), getattr(whole, name), msg=name)
    of_hidden, of_weight, of_bias = zip(*(gradients for _, gradients in parts), strict=True)
    assert hidden.grad is not None
    torch.testing.assert_close(sum(of_hidden), hidden.grad)
    torch.testing.assert_close(torch.cat(of_weight), weight.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(torch.cat(of_bias), bias.grad)


@pytest.mark.parametrize(
    ("rank", "here", "rows", "is_here"),
    [(0, MOST, [0, 0, 2], [True, False, True]), (1, 2, [0, 1, 0], [False, True, False])],
)
def test_a_label_of_another_rank_stands_for_the_first_row_and_is_not_here(
    rank: int, here: int, rows: list[int], is_here: list[bool]
) -> None:
    found = Board(1).part(rank).rows(torch.tensor([0, 4, 2]), here)
    assert found[0].tolist() == rows
    assert found[1].tolist() == is_here
