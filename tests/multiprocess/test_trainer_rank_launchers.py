"""Trainer ranks meet under any launcher: torchrun with and without its own store, or sluice."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from sluice.launch.service_spec import free_ports
from tests.support.loopback import needs_ipv6
from tests.support.preloaded import PreloadedProcess

MEETING_S = 400.0
ALL_S = 600.0


@pytest.mark.parametrize(
    ("is_shared", "disabled"), [("True", "0"), ("False", "1")], ids=["agent's store", "own store"]
)
def test_ranks_of_torchrun_meet_with_and_without_a_store_of_its_agent(
    is_shared: str, disabled: str
) -> None:
    run = PreloadedProcess(
        "torch.distributed.run",
        [
            *("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", "-m", "tests.support.rank_sums", str(MEETING_S)),
        ],
        {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": disabled},
    )
    try:
        assert run.wait(ALL_S) == 0
        answer = json.loads(run.stdout.readline())
    finally:
        run.close()
    assert answer == {"gathered": [[0.0], [1.0]], "agent_store": is_shared}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_ranks_that_start_in_any_order_meet_at_an_address_of_either_family(host: str) -> None:
    (port,), world_size = free_ports([host]), 3
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
