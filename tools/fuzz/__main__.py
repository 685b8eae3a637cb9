"""Send hostile requests to a live run, and check what is left of it; `make fuzz`.

The last line printed is one JSON object: `requests` made, `missing` (requested, and not made within
`--minutes`, which fails as well), `crashes` (answers with a code of a defect, and processes that
ended), `leaks` (slots, prompts, memory, files, threads not given back, or a service that no longer
answers correctly), `leased` (samples that the attack leased), answers by code, the seed, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from sluice.client import AsyncClient
from sluice.client.run_address import locate_run
from sluice.openai_server.web_app import OpenAIServer, OpenAIServerSettings, listening
from sluice.rpc.client import open_channel
from tools.fuzz.aftermath import HonestCaller, Size, growth_leaks, size_of
from tools.fuzz.honest_agents import HonestAgents
from tools.fuzz.openai_traffic import OpenAITraffic
from tools.fuzz.traffic import Traffic
from tools.launched_run import LOOPBACK, LaunchedRun, settings_file, training_run
from tools.phases import say, tool_parser

_WITHIN = aiohttp.ClientTimeout(total=15.0)  # of a request over HTTP
_WARM_UP_SHARE, _ROUNDS, _START_S = 0.15, 20, 400.0
_SHRINK_S, _LOOK_S = 60.0, 1.0


def main(arguments: Sequence[str]) -> int:
    """Fuzz; return 0 if nothing was found, and as many requests were made as requested."""
    options = _parse(arguments)
    settings = [settings_file("fuzz")]
    with training_run("tiny", settings, folder=options.folder, seed=options.seed) as run:
        report = asyncio.run(_fuzz(run, options))
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if report["crashes"] or report["leaks"] or report["missing"] else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m tools.fuzz --requests 3000 --seed 7")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="no further requests after; fewer than requested fail",
    )
    parser.add_argument("--in-flight", type=int, default=48, help="calls at once")
    parser.add_argument("--folder", type=Path, help="keep model, configuration and logs here")
    return parser.parse_args(arguments)


async def _fuzz(run: LaunchedRun, options: argparse.Namespace) -> dict[str, object]:
    """Fuzz a run whose samples are leased, and let programs work on them meanwhile."""
    agents = HonestAgents(run.run_dir)
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(agents.work())
        try:
            return await _attacked(run, agents, options)
        finally:
            working.cancel()


async def _attacked(
    run: LaunchedRun, agents: HonestAgents, options: argparse.Namespace
) -> dict[str, object]:
    started_s = time.monotonic()
    async with AsyncExitStack() as stack:
        seen = await run.until_training(1, 1, _START_S)
        place = locate_run(run.run_dir)
        addresses = {"trainer": place.trainer, "reward": place.reward}
        addresses["rollout-0"] = seen.replicas[0].address
        channels = {
            name: await stack.enter_async_context(open_channel(address, max_message_bytes=1 << 27))
            for name, address in addresses.items()
        }
        client = await stack.enter_async_context(AsyncClient.connect(run.run_dir))
        caller = HonestCaller(client, channels)
        openai_traffic = await stack.enter_async_context(_openai(client, options.seed))
        traffic = Traffic(channels, random.Random(options.seed), openai_traffic)
        # As long as nobody else works, the run has samples for the attack.
        agents.may_work.clear()
        await run.until("a sample to lease", traffic.lease, _START_S)
        await caller.pause()
        pids = await _pids(run)
        warm_up = int(options.requests * _WARM_UP_SHARE)
        await traffic.send(warm_up, options.in_flight)
        before = _sizes(pids)
        per_round = -(-(options.requests - warm_up) // _ROUNDS)
        for number in range(_ROUNDS):
            if time.monotonic() - started_s < 60 * options.minutes:
                await traffic.send(per_round, options.in_flight)
                say(f"{number + 1}/{_ROUNDS}: {traffic.codes.total()} requests")
        after_pids = await _pids(run)
        died = [name for name, pid in pids.items() if after_pids.get(name) != pid]
        agents.may_work.set()
        await caller.restore(traffic.holders)
        # Calls that were left end late on a busy machine; what stays is a leak.
        ends_s, now_pids = time.monotonic() + _SHRINK_S, {**pids, **after_pids}
        after = _sizes(now_pids)
        while growth_leaks(before, after) and time.monotonic() < ends_s:
            await asyncio.sleep(_LOOK_S)
            after = _sizes(now_pids)
        leaks = growth_leaks(before, after) | await caller.leaks()
    for example in traffic.examples:
        say(example)
    return {
        "requests": traffic.codes.total(),
        "missing": max(options.requests - traffic.codes.total(), 0),
        "crashes": traffic.crashes + len(died),
        "leaks": len(leaks),
        "died": died,
        "leaked": leaks,
        "leased": traffic.num_leased,
        "by_method": dict(traffic.by_method),
        "codes": dict(traffic.codes.most_common()),
        "rss_mb_before": {name: round(size["memory, MB"], 1) for name, size in before.items()},
        "rss_mb_after": {name: round(size["memory, MB"], 1) for name, size in after.items()},
        "seed": options.seed,
        "seconds": round(time.monotonic() - started_s, 1),
    }


@asynccontextmanager
async def _openai(client: AsyncClient, seed: int) -> AsyncIterator[OpenAITraffic]:
    """Serve OpenAI's dialect in this process, and send it requests."""
    server = OpenAIServer(client, OpenAIServerSettings())
    async with (
        listening(server, LOOPBACK, 0) as port,
        aiohttp.ClientSession(f"http://{LOOPBACK}:{port}", timeout=_WITHIN) as session,
    ):
        yield OpenAITraffic(session, random.Random(seed))


async def _pids(run: LaunchedRun) -> dict[str, int]:
    processes = await run.until("the launcher's answer", run.processes, _START_S)
    return {name: one.pid for name, one in processes.items()}


def _sizes(pids: dict[str, int]) -> dict[str, Size]:
    return {name: size_of(pid) for name, pid in pids.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
