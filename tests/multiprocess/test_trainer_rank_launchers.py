"""Trainer ranks meet under any launcher: torchrun with and without its own store, or sluice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.loopback import needs_ipv6
from tests.support.preloaded import PreloadedProcess

ROOT = Path(__file__).parents[2]
MEETING_S = 90.0
ALL_S = 200.0


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])


def environment(**given: object) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if "TORCHELASTIC" not in name}
    return inherited | {"OMP_NUM_THREADS": "1"} | {name: str(v) for name, v in given.items()}


@pytest.mark.parametrize(
    ("is_shared", "disabled"), [("True", "0"), ("False", "1")], ids=["agent's store", "own store"]
)
def test_ranks_of_torchrun_meet_with_and_without_a_store_of_its_agent(
    is_shared: str, disabled: str
) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1"),
            *("-m", "tests.support.rank_sums", str(MEETING_S)),
        ],
        cwd=ROOT,
        env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=disabled),
        capture_output=True,
        text=True,
        timeout=ALL_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer == {"gathered": [[0.0], [1.0]], "agent_store": is_shared}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_ranks_that_start_in_any_order_meet_at_an_address_of_either_family(host: str) -> None:
    port, world_size = free_port(host), 3
    with ExitStack() as stack:

        def start(rank: int) -> PreloadedProcess:
            place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            process = PreloadedProcess(
                "tests.support.rank_sums",
                [str(MEETING_S)],
                {"OMP_NUM_THREADS": "1", "MASTER_ADDR": host}
                | {name: str(value) for name, value in place.items()},
            )
            stack.callback(process.close)
            return process

        ranks = {rank: start(rank) for rank in (2, 1, 0)}
        assert [process.wait(ALL_S) for process in ranks.values()] == [0, 0, 0]
        reported = ranks[0].stdout.readline()
    assert json.loads(reported)["gathered"] == [[0.0], [1.0], [2.0]]
