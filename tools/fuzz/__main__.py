"""Send hostile requests to a live run, and check what is left of it; `make fuzz`.

The last line printed is one JSON object: `requests` made, `missing` (asked for, and not made within
`--minutes`, which fails as well), `crashes` (answers that tell of a defect,
and processes that ended), `leaks` (slots, prompts, memory, files, threads not given back, or a
service that no longer answers correctly), answers by code, the seed, seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fuzz.aftermath import RunControl, growth_leaks
from tools.fuzz.live_run import PROCESSES, FuzzedRun, live_run
from tools.fuzz.methods import all_methods
from tools.fuzz.process_size import ProcessSize, measure
from tools.fuzz.traffic import Traffic
from tools.fuzz.valid_requests import valid_requests

WARM_UP_SHARE, ROUNDS = 0.15, 20


def main(arguments: Sequence[str]) -> int:
    """Fuzz; return 0 if nothing was found."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="sluice-fuzz-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_fuzz(folder, options))
    sys.stdout.write(json.dumps(report) + "\n")
    return exit_code(report)


def exit_code(report: Mapping[str, object]) -> int:
    """Return 1 if something was found, or if fewer requests were made than asked for."""
    return 1 if report["crashes"] or report["leaks"] or report["missing"] else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz",
        description="Sends malformed, absurd and broken-off requests to a live run.",
        epilog="example: python -m tools.fuzz --requests 3000 --seed 7",
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="no further requests after; fewer than asked for fail",
    )
    parser.add_argument("--in-flight", type=int, default=48, help="calls at once")
    parser.add_argument("--folder", type=Path, help="keep model, configuration and logs here")
    return parser.parse_args(arguments)


async def _fuzz(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    started_s = time.monotonic()
    async with live_run(folder, options.seed) as run:
        control = RunControl(run)
        await control.started()
        await control.pause()
        pids = {name: run.pid(name) for name in PROCESSES}
        traffic = Traffic(
            all_methods(), valid_requests(), run.channels, random.Random(options.seed)
        )
        warm_up = int(options.requests * WARM_UP_SHARE)
        await traffic.send(warm_up, options.in_flight)
        before = _sizes(run)
        per_round = -(-(options.requests - warm_up) // ROUNDS)
        for number in range(ROUNDS):
            if time.monotonic() - started_s < 60 * options.minutes:
                await traffic.send(per_round, options.in_flight)
                _print_line(f"{number + 1}/{ROUNDS}: {traffic.tally.requests} requests")
        died = [name for name, pid in pids.items() if run.pid(name) != pid]
        await control.restore(traffic.tally.holders)
        leaks = {"slots": await control.slots_leaked()}
        after = _sizes(run)
        leaks |= growth_leaks(before, after)
        leaks["correctness"] = await control.correctness_lost()
        leaks["prompts"] = await control.prompts_leaked()
    found = {name: text for name, text in leaks.items() if text is not None}
    tally = traffic.tally
    for example in tally.examples:
        _print_line(example)
    return {
        "requests": tally.requests,
        "missing": max(options.requests - tally.requests, 0),
        "crashes": tally.crashes + len(died),
        "leaks": len(found),
        "died": died,
        "leaked": found,
        "by_method": dict(tally.by_method),
        "codes": dict(tally.codes.most_common()),
        "rss_mb_before": {name: round(size.rss_mb, 1) for name, size in before.items()},
        "rss_mb_after": {name: round(size.rss_mb, 1) for name, size in after.items()},
        "seed": options.seed,
        "seconds": round(time.monotonic() - started_s, 1),
    }


def _sizes(run: FuzzedRun) -> dict[str, ProcessSize]:
    return {name: measure(pid) for name in PROCESSES if (pid := run.pid(name)) is not None}


def _print_line(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
