"""Weights in a file that is only memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from services.rollout.engines.sglang.engine import WeightHandover

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
_SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4)
_READ = """
import sys
from safetensors.torch import load_file
print(sorted(load_file(sys.argv[1])))
"""


@given(shapes=_SHAPES, dtype=st.sampled_from(_DTYPES))
def test_what_is_read_is_what_was_handed_over(
    shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    memory = torch.arange(400).to(dtype)  # tensors that share memory, as staged ones do
    tensors = {
        f"layer.{place}": memory[place * 20 : place * 20 + rows * columns].view(rows, columns)
        for place, (rows, columns) in enumerate(shapes)
    }
    handover = WeightHandover(tensors)
    found = load_file(handover.folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)
    handover.close()


def test_another_process_can_read_it_until_it_is_closed() -> None:
    handover = WeightHandover({"a": torch.ones(3), "b": torch.zeros(2, 2)})
    file = handover.folder / "model.safetensors"
    read = subprocess.run(
        [sys.executable, "-c", _READ, str(file)], capture_output=True, text=True, check=True
    )
    assert read.stdout.strip() == "['a', 'b']"
    assert not Path(file).resolve().is_relative_to(handover.folder), "it takes no room on a disk"
    handover.close()
    handover.close()
    assert not handover.folder.exists()
