"""States on disk: ranks write in step, fail together, and read no more than their parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from services.trainer.learner import sharded_state
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import StateFiles, TensorFile, keep_step, write_state
from services.trainer.learner.tensor_layouts import exchange_layouts
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_config, save_model


def parts_of(rank: int, done: list[str], fails_at: int | None = None) -> Iterator[None]:
    """As many parts as the rank's number, and three."""
    for part in range(rank + 3):
        if part == fails_at:
            raise OSError("no space left")
        done.append(f"{rank}:{part}")
        yield


def test_ranks_write_one_part_after_the_other_until_all_have_done_theirs() -> None:
    done: list[str] = []
    on_ranks(
        2,
        lambda parallel: parallel,
        lambda parallel: keep_step(parts_of(parallel.rank, done), parallel, "saving"),
    )
    assert [{done.index(f"{rank}:{part}") // 2 for rank in (0, 1)} for part in range(3)] == [
        {0},
        {1},
        {2},
    ]
    assert done[-1] == "1:3"


def test_a_rank_that_cannot_write_ends_the_work_of_all_and_is_named() -> None:
    done: list[str] = []

    def work(parallel: ParallelContext) -> str:
        parts = parts_of(parallel.rank, done, fails_at=1 if parallel.rank else None)
        with pytest.raises(OSError) as caught:
            keep_step(parts, parallel, "saving")
        return str(caught.value)

    first, second = on_ranks(2, lambda parallel: parallel, work)
    assert first == "trainer rank 1 could not write its part; see its log"
    assert second == "no space left"
    assert sorted(done) == ["0:0", "0:1", "1:0"]


def test_ranks_without_a_common_folder_learn_that_they_need_one(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")

    def build(parallel: ParallelContext) -> tuple[Learner, Path]:
        return Learner(make_config(model), parallel, 6), tmp_path / f"{parallel.rank}" / "actor"

    def work(built: tuple[Learner, Path]) -> str:
        learner, folder = built
        try:
            learner.save(folder)
        except OSError as error:
            return str(error)
        return "saved"

    first, second = on_ranks(2, build, work)
    assert "optimizer-00002-of-00002.safetensors, which trainer rank 1 wrote, is not here" in first
    assert "must be a folder that all trainer ranks share" in first
    assert second == "saved"


class Counting:
    """A safetensors file that counts the bytes read from it."""

    read_bytes = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._file = safe_open(*arguments, **options)

    def keys(self) -> Any:
        return self._file.keys()

    def get_slice(self, name: str) -> Any:
        outer, found = self, self._file.get_slice(name)

        class Slice:
            get_shape, get_dtype = found.get_shape, found.get_dtype

            def __getitem__(self, index: Any) -> torch.Tensor:
                Counting.read_bytes += found[index].nbytes
                return found[index]  # type: ignore[no-any-return]

        assert outer is self
        return Slice()


def test_a_rank_reads_the_bytes_of_its_part_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.rand(10, 6, 4)
    alone = ParallelContext()
    places = exchange_layouts({"w": whole}, alone)
    keep_step(write_state(tmp_path, "state", {"w": whole}, places, alone), alone, "saving")
    monkeypatch.setattr(sharded_state, "safe_open", Counting)
    monkeypatch.setattr(sharded_state, "BUCKET_BYTES", 100)  # so that it takes several reads
    monkeypatch.setattr(Counting, "read_bytes", 0)
    part = torch.full((3, 2, 4), torch.nan)
    StateFiles(tmp_path, "state").fill(part, "w", (5, 1, 0))
    assert torch.equal(part, whole[5:8, 1:3])
    assert Counting.read_bytes == part.nbytes


def test_pieces_that_leave_a_hole_in_a_tensor_are_refused(tmp_path: Path) -> None:
    with TensorFile(
        tmp_path / "state-00001-of-00002.safetensors", {"w": ((2, 3), torch.float32)}
    ) as file:
        file.append(torch.ones(2, 3))
    index = {
        "files": ["state-00001-of-00002.safetensors"],
        "tensors": {"w": {"shape": [4, 3], "pieces": [[0, 0, 0]]}},
    }
    (tmp_path / "state.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match="w: the pieces do not make the whole tensor"):
        StateFiles(tmp_path, "state").fill(torch.zeros(4, 3), "w", (0, 0))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_written_in_parts_is_an_ordinary_one(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12).view(4, 3).to(dtype), "b": torch.ones((), dtype=dtype)}
    specs = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
    with TensorFile(tmp_path / "file", specs) as file:
        for rows in (*tensors["a"].split(3), tensors["b"]):
            file.append(rows)
    with safe_open(tmp_path / "file", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name), tensor)
            assert opened.get_tensor(name).dtype == dtype
