"""Trainer ranks in processes of their own, obeying `tests.support.rank_peer`'s commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sluice.launch.service_spec import free_ports
from tests.support.steered_process import SteeredProcess

LONG_S = 120.0


class Rank(SteeredProcess):
    """One process of `tests.support.rank_peer`, or of another module with answers in JSON."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        port: int,
        arguments: dict[str, Any],
        module: str,
    ) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        variables = {"MASTER_ADDR": "127.0.0.1"} | {name: str(v) for name, v in place.items()}
        on_cpu = arguments.get("device", "cpu") == "cpu"
        super().__init__(f"rank {rank}", module, [json.dumps(arguments)], variables, forked=on_cpu)

    def command(self, line: str) -> Any:
        self.tell(line)
        return self.answer()


@contextmanager
def ranks_of(module: str, world_size: int, arguments: dict[str, Any]) -> Iterator[list[Rank]]:
    """Ranks that meet; each answers as the module's `main` does, and is killed at the end."""
    # Of a range from which no connection of another process gets one by chance.
    (port,) = free_ports(["127.0.0.1"])
    with ExitStack() as stack:
        ranks = [Rank(rank, world_size, port, arguments, module) for rank in range(world_size)]
        for rank in ranks:
            stack.callback(rank.end)
        yield ranks


@contextmanager
def trainer(
    model: Path,
    world_size: int,
    timeout_s: float = LONG_S,
    frozen: str | None = None,
    *,
    device: str = "cpu",
    critic: bool | dict[str, Any] = False,
    skips: bool = False,
    recomputes: bool = False,
    adapters: dict[str, Any] | None = None,
    sources: dict[str, Any] | None = None,
    dies_in_exchange: int = 0,
    fails_between_stages: tuple[int, int, bool] | None = None,
    holds: Path | None = None,
    refuses: tuple[int, str] | None = None,
    sends: dict[str, Any] | None = None,
    **actor: Any,
) -> Iterator[list[Rank]]:
    arguments = {
        "model": str(model),
        "timeout_s": timeout_s,
        "forming_timeout_s": LONG_S,
        "actor": actor,
        "frozen": frozen,
        "device": device,
        "critic": critic,
        "skips": skips,
        "recomputes": recomputes,
        "adapters": adapters,
        "sources": sources,
        "dies_in_exchange": dies_in_exchange,
        "fails_between_stages": fails_between_stages,
        "holds": holds and str(holds),
        "refuses": refuses,
        **(sends or {}),
    }
    with ranks_of("tests.support.rank_peer", world_size, arguments) as ranks:
        assert [rank.answer() for rank in ranks] == ["ready"] * world_size
        for rank in ranks:
            rank.tell("go")
        yield ranks


def end(ranks: list[Rank]) -> None:
    """No more commands; all ranks end in order."""
    assert [rank.finish() for rank in ranks] == [0] * len(ranks)
