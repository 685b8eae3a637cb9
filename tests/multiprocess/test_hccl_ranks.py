"""Trainer ranks under the backends of an NPU: Gloo for commands, a stand-in for HCCL beside it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ANSWER_S = 120.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _start(rank: int, port: int) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.hccl_rank"],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        | {name: str(value) for name, value in place.items()},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_ranks_form_both_backends_and_send_rows_without_a_gather() -> None:
    port = _free_port()
    ranks = [_start(rank, port) for rank in range(2)]
    try:
        first, second = (json.loads(rank.communicate(timeout=ANSWER_S)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(ANSWER_S)
    assert first["backends"] == second["backends"] == "cpu:gloo,npu:hccl"
    assert first["total"] == second["total"] == 3.0
    assert first["parts"] == [7.0] * 3
    assert second["parts"] == [0.0] * 3
    assert first["commands"] == second["commands"] == [[0.0], [1.0]]
