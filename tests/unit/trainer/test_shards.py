"""How many ranks share a model, and which rows of a weight each of them holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.learner.model.sharding import shard_rows, shard_size
from sluice.errors import ConfigError


@given(rows=st.integers(0, 40), shards=st.integers(1, 9))
def test_shards_are_cut_as_torch_cuts_them(rows: int, shards: int) -> None:
    whole = torch.arange(rows)
    cut = [whole[slice(*shard_rows(rows, shards, index))] for index in range(shards)]
    assert torch.equal(torch.cat(cut), whole)
    for ours, theirs in zip(cut, whole.chunk(shards), strict=False):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("fsdp_size", "world_size", "expected"),
    [(-1, 4, 4), (0, 4, 4), (1, 4, 1), (2, 4, 2), (4, 4, 4), (16, 4, 4), (-1, 1, 1)],
)
def test_ranks_share_by_fsdp_size(fsdp_size: int, world_size: int, expected: int) -> None:
    assert shard_size(fsdp_size, world_size, "fsdp_size") == expected


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.fsdp\.fsdp_size=3 does not divide the 4"):
        shard_size(3, 4, "critic.fsdp.fsdp_size")
