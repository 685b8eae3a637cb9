"""Sample from a run that trains with gRPC clients in two languages; `make demo-clients`.

Each client is a process and has as many prompts as the others, several of them at a time. Some are
killed while tokens come; others take over the prompts that those had no answer for. Printed last
is one JSON object: prompts answered, lost, failed and answered twice; latency and time to the first
token, seconds; fairness among the clients; requests that were refused or broken off and tried
again; slots left busy; training's steps a minute before, during and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sluice.client.async_client import AsyncClient
from sluice.client.run_address import address_of_run, locate_run
from sluice.config.loading.loader import load_config
from sluice.service_contract import CONFIG_NAME
from tools.launched_run import SHORT_DEADLINES, SIZES, LaunchedRun, training_run
from tools.phases import PhaseError, say, tool_parser

ROOT = Path(__file__).resolve().parents[2]
PYTHON, NODE = "python", "node"
NODE_PACKAGES = ROOT / "tests" / "support" / "node_client" / "node_modules"
_COMMANDS = {
    PYTHON: (sys.executable, "-m", "tools.client_demo.python_client"),
    NODE: (
        "node",
        str(Path(__file__).with_name("node_client.mjs")),
        str(ROOT / "proto"),
        str(NODE_PACKAGES),
    ),
}
_PERCENTILES, _SHOWN_ERRORS = (50, 90, 99), 5
# So many clients start at a time: all at once, each would wait for the others to load its packages,
# and its first call would reach its deadline.
_STARTING = 4
_POLL_S, _WAIT_S, _HOLD_S, _DEADLINE_S = 0.2, 400.0, 240.0, 600.0
Prompts = Sequence[tuple[int, list[dict[str, str]]]]


@dataclass(slots=True)
class Client:
    """One client process and what became of its prompts.

    Args:
        name: unique.
        language: `PYTHON` or `NODE`.
        prompts: number and turns of each.
        vanish_at: it kills itself in the middle of its first answer to a prompt of this number or
            a higher one; None: never.

    Attributes:
        answered: the clients' lines of answered prompts (`python_client` has their keys), each
            with the time that it came, `at_s`.
        failed: why, by prompt.
        under_way: prompts with a first token and no end.
    """

    name: str
    language: str
    prompts: Prompts
    vanish_at: int | None = None
    answered: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    has_vanished: bool = False

    async def run(
        self,
        task: Mapping[str, object],
        starting: asyncio.Semaphore,
        ready: asyncio.Barrier | None = None,
    ) -> None:
        """Start the process, let it begin when all are ready, and read it to its end.

        Raises:
            RuntimeError: it ended otherwise than it should.
        """
        async with AsyncExitStack() as ends:
            async with starting:
                process = await asyncio.create_subprocess_exec(
                    *_COMMANDS[self.language],
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=1 << 20,
                )
                ends.push_async_callback(_end, process)
                assert process.stdin is not None
                assert process.stdout is not None
                own = {"name": self.name, "prompts": self.prompts, "vanish_at": self.vanish_at}
                process.stdin.write(json.dumps({**task, **own}).encode() + b"\n")
                if "ready" not in json.loads(await process.stdout.readline() or b"{}"):
                    raise RuntimeError(f"client {self.name} did not start; its error is above")
            if ready is not None:
                await ready.wait()
            process.stdin.write(b"go\n")
            async for line in process.stdout:
                self._take(json.loads(line))
            code = await process.wait()
        self.has_vanished = self.vanish_at is not None and code == -signal.SIGKILL
        if code != 0 and not self.has_vanished:
            raise RuntimeError(f"client {self.name} ended with code {code}; its error is above")

    def left(self) -> Prompts:
        """Return the prompts without an answer."""
        had = {one["done"] for one in self.answered} | self.failed.keys()
        return [prompt for prompt in self.prompts if prompt[0] not in had]

    def _take(self, line: dict[str, Any]) -> None:
        if "began" in line:
            self.under_way.add(line["began"])
        elif "done" in line:
            self.under_way.discard(line["done"])
            self.answered.append({**line, "at_s": time.monotonic()})
        else:
            self.under_way.discard(line["failed"])
            self.failed[line["failed"]] = str(line["error"])


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 1 if an answer is missing or doubled, or training stood still."""
    options = _parse(arguments)
    settings = (
        SHORT_DEADLINES,
        "sluice.rollout.replicas=2",
        "trainer.save_freq=-1",
        f"actor_rollout_ref.rollout.max_num_seqs={options.slots}",
        # Replicas refuse calls beyond so many waiting samples.
        f"sluice.rollout.max_queued={options.max_queued}",
    )
    with training_run(options.run, settings, folder=options.folder) as run:
        report = asyncio.run(_demo(run, options))
    sys.stdout.write(json.dumps(report) + "\n")
    wrong = ("lost", "failed", "answered_twice", "slots_left", "run_exit_code")
    training = report["training_steps_per_minute"]
    assert isinstance(training, Mapping)
    return 1 if any(report[name] for name in wrong) or not all(training.values()) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m tools.client_demo --prompts 500 --clients 10")
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--vanish", type=int, default=6, help="clients that are killed")
    parser.add_argument("--concurrency", type=int, default=4, help="prompts of a client at a time")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a response")
    parser.add_argument("--run", choices=SIZES, default="stretch", help="what is trained")
    parser.add_argument("--slots", type=int, default=64, help="of a replica")
    parser.add_argument("--max-queued", type=int, default=32, help="of a replica")
    parser.add_argument("--calm", type=float, default=30.0, help="seconds before and after")
    parser.add_argument("--languages", nargs="+", choices=(PYTHON, NODE), default=[PYTHON, NODE])
    parser.add_argument("--folder", type=Path, help="keep model, configuration and logs here")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.vanish < parsed.clients <= parsed.prompts:
        parser.error("give more clients than vanish, and a prompt at least for each")
    if NODE in parsed.languages and not (NODE_PACKAGES / "@grpc").is_dir():
        parser.error(f"no {NODE_PACKAGES}: `make demo-clients` installs Node's packages")
    return parsed


async def _demo(run: LaunchedRun, options: argparse.Namespace) -> dict[str, object]:
    await run.until_training(3, 2, _WAIT_S)
    data = load_config(run.run_dir / CONFIG_NAME, []).data
    rows = pq.read_table(data.train_files, columns=["prompt"]).to_pylist()
    paces = {"before": await _pace(run, asyncio.sleep(options.calm))}
    say(f"training alone: {paces['before']} steps a minute")
    task = {
        "run": str(run.run_dir),
        "trainer": locate_run(run.run_dir).trainer,
        "concurrency": options.concurrency,
        "max_tokens": options.max_tokens,
        "deadline_s": _DEADLINE_S,
    }
    clients = _plan([row["prompt"] for row in rows], options)
    paces["during"] = await _pace(run, _run_clients(clients, task))
    say(f"with clients: {paces['during']} steps a minute")
    slots_left = await _slots_left(run)
    paces["after"] = await _pace(run, asyncio.sleep(options.calm))
    code = await run.stop("the clients are done")
    return _report(clients, options) | {
        "slots_left": slots_left,
        "training_steps_per_minute": paces,
        "run_exit_code": code,
    }


def _plan(rows: Sequence[list[dict[str, str]]], options: argparse.Namespace) -> list[Client]:
    """Give prompts to clients of alternating languages; spread those that vanish, also in time."""
    prompts = [(number, rows[number % len(rows)]) for number in range(options.prompts)]
    clients = []
    for index in range(options.clients):
        language = options.languages[index % len(options.languages)]
        mine = prompts[index :: options.clients]
        clients.append(Client(f"{language}-{index}", language, mine))
    # The n-th to vanish does so after about n of `vanish` + 1 equal parts of its prompts, which it
    # asks in order. An odd step alternates their languages.
    step = max(1, options.clients // max(options.vanish, 1) - 1) | 1
    for number, client in enumerate(clients[::step][: options.vanish], start=1):
        client.vanish_at = client.prompts[number * len(client.prompts) // (options.vanish + 1)][0]
    return clients


async def _run_clients(clients: list[Client], task: Mapping[str, object]) -> None:
    """Run all to their end, and successors of those that vanished, which are added to them."""
    ready, starting = asyncio.Barrier(len(clients)), asyncio.Semaphore(_STARTING)

    async def run(client: Client) -> None:
        await client.run(task, starting, ready)
        left = client.left()
        if client.has_vanished and left:
            say(f"{client.name} has vanished with {len(client.under_way)} answers under way")
            heir = Client(f"{client.name}-heir", client.language, left)
            await heir.run(task, starting)
            clients.append(heir)

    async with asyncio.TaskGroup() as tasks:
        for client in list(clients):
            tasks.create_task(run(client), name=client.name)


def _report(clients: Sequence[Client], options: argparse.Namespace) -> dict[str, object]:
    for client in clients:
        for prompt, error in list(client.failed.items())[:_SHOWN_ERRORS]:
            say(f"{client.name}: prompt {prompt}: {error}")
    vanished = [client for client in clients if client.has_vanished]
    answered = [one for client in clients for one in client.answered]
    answers = Counter(one["done"] for one in answered)
    failed = {prompt for client in clients for prompt in client.failed} - answers.keys()
    return {
        "prompts": options.prompts,
        "clients": options.clients,
        "answered": len(answers),
        "lost": len(set(range(options.prompts)) - answers.keys() - failed),
        "failed": len(failed),
        "answered_twice": answers.total() - len(answers),
        "vanished": len(vanished),
        "vanished_mid_stream": sum(bool(client.under_way) for client in vanished),
        "latency_s": percentiles(one["seconds"] for one in answered),
        "first_token_s": percentiles(one["first_s"] for one in answered),
        "fairness": fairness(clients[: options.clients]),
        "tried_again": sum(one["retries"] for one in answered),
    }


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
    `min_over_max` is the least over the most served one.
    """
    staying = [client for client in clients if not client.has_vanished and client.answered]
    if not staying:
        return {}
    until_s = min(client.answered[-1]["at_s"] for client in staying)
    tokens = [
        sum(one["tokens"] for one in client.answered if one["at_s"] <= until_s)
        for client in staying
    ]
    squares = sum(each * each for each in tokens)
    return {
        "jain": round(sum(tokens) ** 2 / (len(tokens) * squares) if squares else 0.0, 4),
        "min_over_max": round(min(tokens) / max(tokens), 3),
    }


async def _pace(run: LaunchedRun, work: Awaitable[None]) -> float:
    """Return training's steps a minute during `work`, and until one is done; 0: none in time."""
    async with run.monitor() as monitor:
        before, began_s = (await monitor.snapshot()).step, time.monotonic()
        await work
        with suppress(PhaseError):  # a slow machine may need longer for a step than `work` takes
            await run.until_training(before + 1, 0, _HOLD_S)
        steps = (await monitor.snapshot()).step - before
    return round(60 * steps / (time.monotonic() - began_s), 2)


async def _slots_left(run: LaunchedRun) -> int:
    """Return samples in engines or waiting for one, while training is paused and satisfied."""
    async with run.monitor() as monitor, monitor.held(_HOLD_S) as seen:
        replicas = tuple(one.address for one in seen.replicas)
        address = replace(address_of_run(run.run_dir), replicas=replicas)
        ends_s = time.monotonic() + _HOLD_S
        async with AsyncClient(address) as client:
            while True:
                busy = sum(replica.slots_busy for replica in await client.replicas())
                if not busy or time.monotonic() > ends_s:
                    return busy
                await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
