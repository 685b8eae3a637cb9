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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.async_client import AsyncClient
from sluice.client.run_address import address_of_run
from sluice.client.run_monitor import RunMonitor
from sluice.config.addresses import peer_address
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from sluice.rpc.client import open_channel, trainer_stub, unary_call
from tools.chaos.launched_run import LaunchedRun, launched_run
from tools.chaos.preparation import SIZES, prepare_run
from tools.client_demo.clients import (
    NODE,
    NODE_PACKAGES,
    PYTHON,
    Client,
    count_answers,
    fairness,
    percentiles,
)
from tools.phases import say

_SHOWN_ERRORS = 5
_POLL_S, _WAIT_S, _HOLD_S = 0.2, 180.0, 60.0


def main(arguments: Sequence[str]) -> int:
    """Run the demo; return 0 if nothing was lost, and training continued."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="sluice-clients-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_demo(folder, options))
    sys.stdout.write(json.dumps(report) + "\n")
    return exit_code(report)


def exit_code(report: Mapping[str, object]) -> int:
    """Return 1 if an answer is missing or doubled, a slot stays busy, or training stood still."""
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
    base = SIZES[options.run]
    overrides = (
        *base.overrides,
        "trainer.save_freq=-1",
        f"actor_rollout_ref.rollout.max_num_seqs={options.slots}",
        # Replicas refuse calls beyond so many waiting samples.
        f"sluice.rollout.max_queued={options.max_queued}",
    )
    say("making model and data")
    size = replace(base, overrides=overrides)
    config, file = prepare_run(folder, size, seed=options.seed, host="127.0.0.1")
    async with launched_run(config, file, None) as launched:
        await _until_training(launched)
        before = await _pace(launched, options.calm)
        say(f"training alone: {before:.1f} steps a minute")
        trainer = peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint")
        task = {
            "run": str(launched.run_dir),
            "trainer": trainer,
            "concurrency": options.concurrency,
            "max_tokens": options.max_tokens,
            "deadline_s": options.deadline,
            "patience_s": options.deadline,
        }
        step, clients_from_s = await _step(launched), time.monotonic()
        clients = await _run_clients(_plan(config, options), task)
        seconds = time.monotonic() - clients_from_s
        during = 60 * (await _step(launched) - step) / seconds
        say(f"with clients: {during:.1f} steps a minute")
        slots_left = await _slots_left(launched)
        after = await _pace(launched, options.calm)
        code = await _stop(launched)
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
    files = config.data.train_files
    names = [files] if isinstance(files, str) else files or []
    rows = [row for name in names for row in pq.read_table(name, columns=["prompt"]).to_pylist()]
    prompts = [(number, rows[number % len(rows)]["prompt"]) for number in range(options.prompts)]
    languages, last = options.languages, options.clients - 1
    vanish = [
        min(place * options.clients // options.vanish + place % len(languages), last)
        for place in range(options.vanish)
    ]
    clients = []
    for index in range(options.clients):
        mine = prompts[index :: options.clients]
        language = languages[index % len(languages)]
        is_place = index in vanish
        after = (vanish.index(index) + 1) * len(mine) // (options.vanish + 1) if is_place else None
        clients.append(Client(f"{language}-{index}", language, mine, after))
    return clients


async def _run_clients(clients: Sequence[Client], task: dict[str, object]) -> list[Client]:
    """Run all to their end, and successors of those that vanished; return all of them."""
    ready = asyncio.Barrier(len(clients))
    done: list[Client] = []

    async def run(client: Client) -> None:
        await client.run(task, ready)
        done.append(client)
        left = client.left()
        if client.vanished and left:
            say(f"{client.name} has vanished with {len(client.under_way)} answers under way")
            heir = Client(f"{client.name}-heir", client.language, left)
            await heir.run(task)
            done.append(heir)

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(run(client), name=client.name)
    return done


def _report(clients: Sequence[Client], options: argparse.Namespace) -> dict[str, object]:
    for client in clients:
        for prompt, error in list(client.failed.items())[:_SHOWN_ERRORS]:
            say(f"{client.name}: prompt {prompt}: {error}")
    first = [client for client in clients if not client.name.endswith("-heir")]
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


def _monitor(run: LaunchedRun) -> RunMonitor:
    address = address_of_run(run.run_dir)
    assert address.trainer is not None
    assert address.reward is not None
    return RunMonitor(address.trainer, address.reward, credentials=address.credentials)


async def _until_training(run: LaunchedRun, step: int = 3) -> None:
    """Wait until so many steps are done and the replicas serve."""
    ends_s, last = time.monotonic() + _WAIT_S, "no answer yet"
    while True:
        if run.up.returncode is not None:
            raise RuntimeError(f"the run ended with {run.up.returncode} before step {step}")
        if time.monotonic() > ends_s:
            raise RuntimeError(f"no step {step} with all replicas within {_WAIT_S:g} s: {last}")
        try:
            async with _monitor(run) as monitor:
                seen = await monitor.snapshot()
        except SluiceError as error:  # it is starting
            last = str(error)
        else:
            serving = sum(replica.state == "serving" for replica in seen.replicas)
            if seen.step >= step and serving >= run.config.sluice.rollout.replicas:
                return
            last = f"step {seen.step}, {seen.phase}"
        await asyncio.sleep(_POLL_S)


async def _step(run: LaunchedRun) -> int:
    async with _monitor(run) as monitor:
        return (await monitor.snapshot()).step


async def _pace(run: LaunchedRun, seconds: float) -> float:
    """Measure training's own steps a minute for so long."""
    before, began_s = await _step(run), time.monotonic()
    await asyncio.sleep(seconds)
    return 60 * (await _step(run) - before) / (time.monotonic() - began_s)


async def _busy(run: LaunchedRun) -> int:
    async with _monitor(run) as monitor:
        replicas = [each.address for each in (await monitor.snapshot()).replicas]
    address = address_of_run(run.run_dir)
    alone = type(address)(replicas=tuple(replicas), credentials=address.credentials)
    async with AsyncClient(alone) as client:
        return sum(replica.slots_busy for replica in await client.replicas())


async def _slots_left(run: LaunchedRun) -> int:
    """Return samples in engines or waiting for one, while training is held and satisfied."""
    async with _monitor(run) as monitor, monitor.held(_HOLD_S):
        ends_s, busy = time.monotonic() + _HOLD_S, await _busy(run)
        while busy and time.monotonic() < ends_s:
            await asyncio.sleep(_POLL_S)
            busy = await _busy(run)
        return busy


async def _stop(run: LaunchedRun) -> int:
    """End the run as at its last step; return the launcher's exit code."""
    address = address_of_run(run.run_dir)
    assert address.trainer is not None
    async with open_channel(address.trainer, max_message_bytes=1 << 20) as channel:
        await unary_call(
            trainer_stub(channel).Stop,
            trainer_pb2.StopRequest(reason="the clients are done"),
            name="TrainerService/Stop",
            peer="trainer",
            phase="asking it to stop",
        )
    return await run.ended()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
