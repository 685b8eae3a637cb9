"""The demo's clients as processes, and what became of their prompts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON, NODE = "python", "node"
NODE_PACKAGES = ROOT / "tests" / "support" / "node_client" / "node_modules"
_PERCENTILES = (50, 90, 99)
Turns = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's answer; seconds count from the first request, with refusals and waits."""

    prompt: int
    seconds: float
    first_s: float
    tokens: int
    retries: int
    at_s: float


@dataclass(slots=True)
class Client:
    """One client process and its record.

    Args:
        name: unique.
        language: `PYTHON` or `NODE`.
        prompts: number and turns of each.
        vanish_after: it is killed after so many answers, while another one comes; None: never.
    """

    name: str
    language: str
    prompts: Sequence[tuple[int, Turns]]
    vanish_after: int | None = None
    answered: list[Answered] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    vanished: bool = False

    async def run(self, task: dict[str, object], ready: asyncio.Barrier | None = None) -> None:
        """Start the process, let it begin when all are ready, and read it to its end.

        Raises:
            RuntimeError: it ended otherwise than it should.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command(),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        own = {"name": self.name, "vanish_after": self.vanish_after, "prompts": self.prompts}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({**task, **own}).encode() + b"\n")
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
        self.vanished = self.vanished and code != 0  # or it had ended before the signal came
        if code != (-signal.SIGKILL if self.vanished else 0):
            raise RuntimeError(f"client {self.name} ended with code {code}; its error is above")

    def left(self) -> list[tuple[int, Turns]]:
        """Return the prompts without an answer."""
        had = {one.prompt for one in self.answered} | self.failed.keys()
        return [prompt for prompt in self.prompts if prompt[0] not in had]

    def _command(self) -> tuple[str, ...]:
        if self.language == PYTHON:
            return (sys.executable, "-m", "tools.client_demo.python_client")
        script = Path(__file__).with_name("node_client.mjs")
        return ("node", str(script), str(ROOT / "proto"), str(NODE_PACKAGES))

    def _take(self, line: dict[str, Any], process: asyncio.subprocess.Process) -> None:
        if "began" in line:
            self.under_way.add(int(line["began"]))
            after = self.vanish_after
            # The client has stopped itself here, so that this answer's end is not read.
            if after is not None and not self.vanished and len(self.answered) >= after:
                self.vanished = True
                process.kill()
        elif "done" in line:
            number = int(line.pop("done"))
            self.under_way.discard(number)
            self.answered.append(Answered(prompt=number, at_s=time.monotonic(), **line))
        else:
            self.under_way.discard(int(line["failed"]))
            self.failed[int(line["failed"])] = str(line["error"])


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return p50, p90, p99 and the largest, by nearest rank; nothing without values."""
    values = sorted(seconds)
    if not values:
        return {}
    ranks = {f"p{p}": values[-(-p * len(values) // 100) - 1] for p in _PERCENTILES}
    return {name: round(value, 3) for name, value in (ranks | {"max": values[-1]}).items()}


def fairness(clients: Sequence[Client]) -> dict[str, float]:
    """Compare the tokens that clients got while all of them still had prompts.

    `jain` is Jain's index (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything.
    `min_over_max` is of the least and the best served, `share_LANGUAGE` of the mean.
    """
    staying = [client for client in clients if not client.vanished and client.answered]
    if not staying:
        return {}
    until_s = min(client.answered[-1].at_s for client in staying)
    tokens = {
        client.name: float(sum(one.tokens for one in client.answered if one.at_s <= until_s))
        for client in staying
    }
    rates, mean = list(tokens.values()), fmean(tokens.values())
    squares = sum(rate * rate for rate in rates)
    found = {
        "jain": round(sum(rates) ** 2 / (len(rates) * squares) if squares else 0.0, 4),
        "min_over_max": round(min(rates) / max(rates), 3),
    }
    for language in sorted({client.language for client in staying}):
        shares = [tokens[one.name] / mean for one in staying if one.language == language]
        found[f"share_{language}"] = round(fmean(shares), 3)
    return found


def count_answers(num_prompts: int, clients: Sequence[Client]) -> dict[str, int]:
    """Look for the answer of each prompt; prompts are numbered from 0."""
    answers = Counter(one.prompt for client in clients for one in client.answered)
    failed = {prompt for client in clients for prompt in client.failed} - answers.keys()
    return {
        "answered": len(answers),
        "lost": len(set(range(num_prompts)) - answers.keys() - failed),
        "failed": len(failed),
        "answered_twice": sum(count - 1 for count in answers.values()),
    }
