"""Sample from a run that trains with gRPC clients in two languages; `make demo-clients`.

Each client is a process and has as many prompts as the others, some of them at a time. Some are
killed while tokens come; others take over the prompts that those had no answer for. Printed last
is one JSON object: prompts answered, lost, failed and answered twice; latency and time to the first
token, seconds; fairness among the clients; requests that were refused or broken off and tried
again; slots left busy; training's steps a minute before, during and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from sluice.client.async_client import AsyncClient
from sluice.client.run_address import address_of_run, locate_run
from sluice.config.run import RunConfig
from tools.client_demo.clients import (
    NODE,
    NODE_PACKAGES,
    PYTHON,
    Client,
    count_answers,
    fairness,
    percentiles,
)
from tools.launched_run import SHORT_DEADLINES, SIZES, LaunchedRun, launched_run, prepare_run
from tools.phases import say

_SHOWN_ERRORS, _HEIR = 5, "-heir"
_POLL_S, _WAIT_S, _HOLD_S = 0.2, 180.0, 60.0


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 1 if an answer is missing or doubled, or training stood still."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="sluice-clients-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_demo(folder, options))
    sys.stdout.write(json.dumps(report) + "\n")
    wrong = ("lost", "failed", "answered_twice", "slots_left", "run_exit_code")
    training = report["training_steps_per_minute"]
    assert isinstance(training, Mapping)
    return 1 if any(report[name] for name in wrong) or not all(training.values()) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.client_demo",
        description="Samples from a run in training with many gRPC clients in two languages.",
        epilog="example: python -m tools.client_demo --prompts 500 --clients 10",
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--vanish", type=int, default=6, help="clients that are killed")
    parser.add_argument("--concurrency", type=int, default=4, help="prompts of a client at a time")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a response")
    parser.add_argument("--deadline", type=float, default=600.0, help="of a prompt, seconds")
    parser.add_argument("--run", choices=SIZES, default="stretch", help="what is trained")
    parser.add_argument("--slots", type=int, default=64, help="of a replica")
    parser.add_argument("--max-queued", type=int, default=32, help="of a replica")
    parser.add_argument("--calm", type=float, default=30.0, help="seconds before and after")
    parser.add_argument("--languages", nargs="+", choices=(PYTHON, NODE), default=[PYTHON, NODE])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep model, configuration and logs here")
    parsed = parser.parse_args(arguments)
    if not 0 <= parsed.vanish < parsed.clients <= parsed.prompts:
        parser.error("give more clients than vanish, and a prompt at least for each")
    if NODE in parsed.languages and not (NODE_PACKAGES / "@grpc").is_dir():
        parser.error(f"no {NODE_PACKAGES}: `make demo-clients` installs Node's packages")
    return parsed


async def _demo(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    began_s = time.monotonic()
    say("making model and data")
    config, file = prepare_run(
        folder,
        SIZES[options.run],
        (
            *SHORT_DEADLINES,
            "sluice.rollout.replicas=2",
            "trainer.save_freq=-1",
            f"actor_rollout_ref.rollout.max_num_seqs={options.slots}",
            # Replicas refuse calls beyond so many waiting samples.
            f"sluice.rollout.max_queued={options.max_queued}",
        ),
        seed=options.seed,
    )
    with launched_run(config, file) as run:
        await run.until_training(3, 2, _WAIT_S)
        before = await _pace(run, asyncio.sleep(options.calm))
        say(f"training alone: {before:.1f} steps a minute")
        task = {
            "run": str(run.run_dir),
            "trainer": locate_run(run.run_dir).trainer,
            "concurrency": options.concurrency,
            "max_tokens": options.max_tokens,
            "deadline_s": options.deadline,
        }
        clients, clients_from_s = _plan(config, options), time.monotonic()
        during = await _pace(run, _run_clients(clients, task))
        seconds = time.monotonic() - clients_from_s
        say(f"with clients: {during:.1f} steps a minute")
        slots_left = await _slots_left(run)
        after = await _pace(run, asyncio.sleep(options.calm))
        code = await run.stop("the clients are done")
    paces = {"before": before, "during": during, "after": after}
    return _report(clients, options) | {
        "slots_left": slots_left,
        "training_steps_per_minute": {name: round(pace, 2) for name, pace in paces.items()},
        "seconds_of_clients": round(seconds, 1),
        "seconds": round(time.monotonic() - began_s, 1),
        "run_exit_code": code,
    }


def _plan(config: RunConfig, options: argparse.Namespace) -> list[Client]:
    """Give prompts to clients of alternating languages; spread those that vanish, also in time."""
    rows = pq.read_table(config.data.train_files, columns=["prompt"]).to_pylist()
    prompts = [(number, rows[number % len(rows)]["prompt"]) for number in range(options.prompts)]
    languages, vanish = options.languages, options.vanish
    # The n-th to vanish does so after n of `vanish` + 1 equal parts of its prompts.
    order = {
        min(n * options.clients // vanish + n % len(languages), options.clients - 1): n + 1
        for n in range(vanish)
    }
    clients = []
    for index in range(options.clients):
        mine, language = prompts[index :: options.clients], languages[index % len(languages)]
        after = order[index] * len(mine) // (vanish + 1) if index in order else None
        clients.append(Client(f"{language}-{index}", language, mine, after))
    return clients


async def _run_clients(clients: list[Client], task: dict[str, object]) -> None:
    """Run all to their end, and successors of those that vanished, which are added to them."""
    ready = asyncio.Barrier(len(clients))

    async def run(client: Client) -> None:
        await client.run(task, ready)
        left = client.left()
        if client.vanished and left:
            say(f"{client.name} has vanished with {len(client.under_way)} answers under way")
            heir = Client(f"{client.name}{_HEIR}", client.language, left)
            await heir.run(task)
            clients.append(heir)

    async with asyncio.TaskGroup() as tasks:
        for client in list(clients):
            tasks.create_task(run(client), name=client.name)


def _report(clients: Sequence[Client], options: argparse.Namespace) -> dict[str, object]:
    for client in clients:
        for prompt, error in list(client.failed.items())[:_SHOWN_ERRORS]:
            say(f"{client.name}: prompt {prompt}: {error}")
    first = [client for client in clients if not client.name.endswith(_HEIR)]
    vanished = [client for client in clients if client.vanished]
    by_language = {
        language: [
            one for client in clients if client.language == language for one in client.answered
        ]
        for language in options.languages
    }
    answered = [one for found in by_language.values() for one in found]
    return {
        "prompts": options.prompts,
        "clients": {
            language: sum(client.language == language for client in first)
            for language in options.languages
        },
        **count_answers(options.prompts, clients),
        "vanished": len(vanished),
        "vanished_mid_stream": sum(bool(client.under_way) for client in vanished),
        "latency_s": percentiles(one.seconds for one in answered),
        "first_token_s": percentiles(one.first_s for one in answered),
        "fairness": fairness(first),
        "tried_again": sum(one.retries for one in answered),
        "by_language": {
            language: {
                "answered": len(own),
                "latency_s": percentiles(one.seconds for one in own),
                "tried_again": sum(one.retries for one in own),
            }
            for language, own in by_language.items()
        },
        "tokens": sum(one.tokens for one in answered),
    }


async def _pace(run: LaunchedRun, work: Awaitable[None]) -> float:
    """Return training's own steps a minute while `work` is done."""
    async with run.monitor() as monitor:
        before, began_s = (await monitor.snapshot()).step, time.monotonic()
        await work
        steps = (await monitor.snapshot()).step - before
    return 60 * steps / (time.monotonic() - began_s)


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
