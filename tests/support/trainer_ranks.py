"""Trainer ranks in processes of their own, obeying `tests.support.rank_peer`'s commands."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.preloaded import PreloadedProcess

ANSWER_S = 90.0
LONG_S = 60.0
_ENDED = object()


class Rank:
    """One process of `tests.support.rank_peer`, or of another module with answers in JSON."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        port: int,
        arguments: dict[str, Any],
        module: str,
    ) -> None:
        self.name = f"rank {rank}"
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        variables = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        variables |= {name: str(value) for name, value in place.items()}
        self.process: Any
        if arguments.get("device", "cpu") == "cpu":
            self.process = PreloadedProcess(module, [json.dumps(arguments)], variables)
        else:  # a fork of a process that has looked at the driver could not use it
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(arguments)],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def command(self, line: str) -> Any:
        self.tell(line)
        return self.answer()

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} did not answer within {timeout_s} s") from None
        assert found is not _ENDED, f"{self.name} ended without an answer"
        return found

    def finish(self) -> int:
        """No more commands; the exit code."""
        self.process.stdin.close()
        return self.process.wait(ANSWER_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)
        self._reader.join(ANSWER_S)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(_ENDED)


@contextmanager
def ranks_of(module: str, world_size: int, arguments: dict[str, Any]) -> Iterator[list[Rank]]:
    """Ranks that meet; each answers as the module's `main` does, and is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
