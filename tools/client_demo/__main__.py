"""`make demo-clients`: gRPC clients in two languages on a run that goes on training.

Each client is a process and has as many prompts as the others, some of them at a time. Some are
killed while tokens come; others take over what those had no answer of. Printed last is one JSON
object: prompts answered, lost, failed and answered twice; latency and time to the first token,
seconds; fairness among the clients; requests that were refused or broken off and tried again; slots
left busy; training's steps a minute before, during and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sluice.config.addresses import peer_address
from sluice.config.run import RunConfig
from tools.chaos.launched_run import launched_run
from tools.chaos.preparation import SIZES, prepare_run
from tools.client_demo.client_process import (
    NODE,
    PYTHON,
    ClientProcess,
    ClientTask,
    node_packages,
)
from tools.client_demo.figures import ClientRecord, fairness, judge, percentiles
from tools.client_demo.training_run import Pace, RunUnderClients, demo_size, prompts_of

_SHOWN_ERRORS = 5


def main(arguments: Sequence[str]) -> int:
    """Runs the demo; 0: nothing was lost, and training went on."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="sluice-clients-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_demo(folder, options))
    sys.stdout.write(json.dumps(report) + "\n")
    return exit_code(report)


def exit_code(report: Mapping[str, object]) -> int:
    """1 if a prompt has not exactly one answer, a slot stays busy, or training stood still."""
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
    if NODE in parsed.languages and not (node_packages() / "@grpc").is_dir():
        parser.error(f"no {node_packages()}: `make demo-clients` installs Node's packages")
    return parsed


async def _demo(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    began_s = time.monotonic()
    size = demo_size(options.run, options.slots, options.max_queued)
    _print_line("making model and data")
    config, file = prepare_run(folder, size, seed=options.seed, host="127.0.0.1")
    async with launched_run(config, file, None) as launched:
        run = RunUnderClients(launched)
        await run.until_step(3)
        before = await run.pace(options.calm)
        _print_line(f"training alone: {before.steps_per_minute:.1f} steps a minute")
        task = ClientTask(
            launched.run_dir,
            peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint"),
            options.concurrency,
            options.max_tokens,
            options.deadline,
        )
        step, clients_from_s = await run.step(), time.monotonic()
        records = await _clients(_plan(config, options), task)
        seconds = time.monotonic() - clients_from_s
        during = Pace(await run.step() - step, seconds)
        _print_line(f"with clients: {during.steps_per_minute:.1f} steps a minute")
        slots_left = await run.slots_left()
        after = await run.pace(options.calm)
        code = await run.stop()
    paces = {"before": before, "during": during, "after": after}
    return _report(records, options) | {
        "slots_left": slots_left,
        "training_steps_per_minute": {n: round(p.steps_per_minute, 2) for n, p in paces.items()},
        "seconds_of_clients": round(seconds, 1),
        "seconds": round(time.monotonic() - began_s, 1),
        "run_exit_code": code,
    }


def _plan(config: RunConfig, options: argparse.Namespace) -> list[ClientProcess]:
    """Languages take turns; those that vanish are spread over the clients, and over the time."""
    turns, languages = prompts_of(config), options.languages
    prompts = [(number, turns[number % len(turns)]) for number in range(options.prompts)]
    last = options.clients - 1
    vanish = [
        min(place * options.clients // options.vanish + place % len(languages), last)
        for place in range(options.vanish)
    ]
    clients = []
    for index in range(options.clients):
        mine = prompts[index :: options.clients]
        language = languages[index % len(languages)]
        # Early, late, and in between.
        is_place = index in vanish
        after = (vanish.index(index) + 1) * len(mine) // (options.vanish + 1) if is_place else None
        clients.append(ClientProcess(f"{language}-{index}", language, mine, after))
    return clients


async def _clients(clients: Sequence[ClientProcess], task: ClientTask) -> list[ClientRecord]:
    """Runs all to their end, and successors of those that vanished."""
    ready = asyncio.Barrier(len(clients))
    records: list[ClientRecord] = []

    async def run(client: ClientProcess) -> None:
        record = await client.run(task, ready)
        records.append(record)
        left = client.left()
        if record.vanished and left:
            _print_line(
                f"{client.name} has vanished with {len(record.under_way)} answers under way"
            )
            heir = ClientProcess(f"{client.name}-heir", client.language, left)
            records.append(await heir.run(task))

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(run(client), name=client.name)
    return records


def _report(records: Sequence[ClientRecord], options: argparse.Namespace) -> dict[str, object]:
    judgement = judge(options.prompts, records)
    answered = [one for record in records for one in record.answered]
    for record in records:
        for prompt, error in list(record.failed.items())[:_SHOWN_ERRORS]:
            _print_line(f"{record.name}: prompt {prompt}: {error}")
    heirs = {record.name for record in records if record.name.endswith("-heir")}
    vanished = [record for record in records if record.vanished]
    return {
        "prompts": options.prompts,
        "clients": {
            language: sum(
                record.language == language for record in records if record.name not in heirs
            )
            for language in options.languages
        },
        "answered": len({one.prompt for one in answered}),
        "lost": judgement.lost,
        "failed": judgement.failed,
        "answered_twice": judgement.twice,
        "vanished": len(vanished),
        "vanished_mid_stream": sum(bool(record.under_way) for record in vanished),
        "latency_s": percentiles(one.seconds for one in answered),
        "first_token_s": percentiles(one.first_s for one in answered),
        "fairness": fairness([record for record in records if record.name not in heirs]),
        "tried_again": sum(one.retries for one in answered),
        "by_language": {each: _of_language(records, each) for each in options.languages},
        "tokens": sum(one.tokens for one in answered),
    }


def _of_language(records: Sequence[ClientRecord], language: str) -> dict[str, object]:
    """Whether one language's clients fare worse, and why."""
    own = [one for each in records if each.language == language for one in each.answered]
    return {
        "answered": len(own),
        "latency_s": percentiles(one.seconds for one in own),
        "tried_again": sum(one.retries for one in own),
    }


def _print_line(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
