"""A client of the demo as a process: what it is told, what it tells, and its sudden end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.client_demo.figures import Answered, ClientRecord

__all__ = ["NODE", "PYTHON", "ROOT", "ClientProcess", "ClientTask", "node_packages"]

ROOT = Path(__file__).resolve().parents[2]
PYTHON, NODE = "python", "node"
Turns = list[dict[str, str]]


def node_packages() -> Path:
    """Where grpc-js and proto-loader are, if `make test-clients` or `make demo-clients` ran."""
    return ROOT / "tests" / "support" / "node_client" / "node_modules"


@dataclass(frozen=True, slots=True)
class ClientTask:
    """What all clients are told alike.

    Args:
        run: folder of the run.
        trainer: its host:port.
        concurrency: prompts of one client at a time.
        max_tokens: of a response.
        deadline_s: of a prompt, retries included.
    """

    run: Path
    trainer: str
    concurrency: int
    max_tokens: int
    deadline_s: float


class ClientProcess:
    """One client.

    Args:
        name: unique; told to the services.
        language: `PYTHON` or `NODE`.
        prompts: number and turns of each.
        vanish_after: it is killed once so many prompts were answered and another one has begun to
            come, where it holds itself, so that this one's end is not read; none: never.
    """

    def __init__(
        self,
        name: str,
        language: str,
        prompts: Sequence[tuple[int, Turns]],
        vanish_after: int | None = None,
    ) -> None:
        self.name, self.language, self.prompts = name, language, prompts
        self._vanish_after = vanish_after
        self._vanished = False
        self._answered: list[Answered] = []
        self._failed: dict[int, str] = {}
        self._under_way: set[int] = set()

    async def run(self, task: ClientTask, ready: asyncio.Barrier | None = None) -> ClientRecord:
        """Starts the process, lets it begin when all are ready, and reads it to its end.

        Raises:
            RuntimeError: it ended otherwise than it was made to.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command(),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._reported(task))
            if "ready" not in json.loads(await process.stdout.readline() or b"{}"):
                raise RuntimeError(f"client {self.name} did not start; its error is above")
            if ready is not None:
                await ready.wait()
            process.stdin.write(b"go\n")
            async for line in process.stdout:
                self._take(json.loads(line), process)
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._vanished = self._vanished and code != 0  # or it had ended before the signal came
        if code != (-signal.SIGKILL if self._vanished else 0):
            raise RuntimeError(f"client {self.name} ended with code {code}; its error is above")
        return self.record()

    def left(self) -> list[tuple[int, Turns]]:
        """Prompts that it had no answer of."""
        had = {one.prompt for one in self._answered} | self._failed.keys()
        return [prompt for prompt in self.prompts if prompt[0] not in had]

    def record(self) -> ClientRecord:
        """What it told."""
        return ClientRecord(
            self.name,
            self.language,
            tuple(self._answered),
            dict(self._failed),
            frozenset(self._under_way),
            vanished=self._vanished,
        )

    def _command(self) -> tuple[str, ...]:
        if self.language == PYTHON:
            return (sys.executable, "-m", "tools.client_demo.python_client")
        script = Path(__file__).with_name("node_client.mjs")
        return ("node", str(script), str(ROOT / "proto"), str(node_packages()))

    def _reported(self, task: ClientTask) -> bytes:
        reported = {
            "run": str(task.run),
            "trainer": task.trainer,
            "name": self.name,
            "concurrency": task.concurrency,
            "max_tokens": task.max_tokens,
            "deadline_s": task.deadline_s,
            "patience_s": task.deadline_s,
            "vanish_after": self._vanish_after,
            "prompts": self.prompts,
        }
        return json.dumps(reported).encode() + b"\n"

    def _take(self, line: dict[str, float | str], process: asyncio.subprocess.Process) -> None:
        if "began" in line:
            self._under_way.add(int(line["began"]))
            self._perhaps_vanish(process)
        elif "done" in line:
            number = int(line["done"])
            self._under_way.discard(number)
            self._answered.append(
                Answered(
                    number,
                    float(line["seconds"]),
                    float(line["first_s"]),
                    int(line["tokens"]),
                    int(line["retries"]),
                    time.monotonic(),
                )
            )
        else:
            self._under_way.discard(int(line["failed"]))
            self._failed[int(line["failed"])] = str(line["error"])

    def _perhaps_vanish(self, process: asyncio.subprocess.Process) -> None:
        if self._vanish_after is None or self._vanished:
            return
        if len(self._answered) >= self._vanish_after:
            self._vanished = True
            process.kill()
