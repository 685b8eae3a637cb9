"""Own decoder layers on several ranks have the gradients of transformers' layers on one."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.layer_parity import MOST_ERROR, plain, worst_error
from tests.support.preloaded import PreloadedProcess
from tests.support.tiny_policy import make_model, save_model

ENDS_S = 90.0


@pytest.mark.parametrize(
    ("family", "world_size", "sharing", "recomputes"),
    [
        ("qwen3", 2, 1, False),
        ("qwen2", 2, 2, False),
        ("llama", 2, 1, True),
        ("qwen3", 2, 2, True),
        ("llama", 4, 2, True),
    ],
)
def test_gradients_of_ranks_are_those_of_transformers_layers_on_one(
    family: str, world_size: int, sharing: int, recomputes: bool, tmp_path: Path
) -> None:
    file = tmp_path / "gradients"
    arguments = {
        "model": str(save_model(tmp_path / "model", family)),
        "sharing": sharing,
        "recomputes": recomputes,
        "file": str(file),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    with ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            process = PreloadedProcess(
                "tests.support.decoder_peer",
                [json.dumps(arguments)],
                {"OMP_NUM_THREADS": "1"} | place | own,
            )
            ranks.append(process)
            for close in (process.stdin.close, process.stdout.close, process.kill):
                stack.callback(close)
        assert [one.wait(ENDS_S) for one in ranks] == [0] * world_size
    _, expected = plain(make_model(family))
    assert worst_error(load_file(file), expected) <= MOST_ERROR
