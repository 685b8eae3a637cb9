"""`make bench-telemetry`: what telling about a run costs the run.

The same short training, the quickstart's job, without telemetry and with each kind of it, in turns;
a run's figures are taken between two of its steps, so that starting and ending do not count.

On a shared machine, equal runs differ by more than telemetry costs. So a run with both kinds is
also asked what it spent on them: what its threads that send spans and answer scrapes took of the
CPU, by their own clocks, and its spans times what `span_cost` measures for recording one, right
after the run. Printed last is one JSON object:

share_traces            of the run's CPU: sending spans, and recording them
share_metrics           of the run's CPU: answering scrapes, one a second from each process
share_<kind>_rounds     round by round
record_us               median: CPU microseconds to record a span
spans_a_step            median
overhead_<kind>         CPU seconds a step of all processes of the run, over those without, less 1;
                        the median over rounds
overhead_<kind>_wall    the same of seconds on the wall
overhead_<kind>_rounds  CPU's, round by round
cpu_s, wall_s           medians a step, by kind
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.metrics_scraper import TelemetryAccount, scraped_run, telemetry_account
from benchmarks.process_cpu import cpu_seconds
from benchmarks.span_cost import record_us
from sluice.launch.run_folder import claim_folder
from sluice.quickstart.prepare import PrepareProgress, prepare

ROOT = Path(__file__).resolve().parent.parent
OFF, BOTH = "off", "both"
# Every step draws and trains the same tokens whatever the clock says, so that CPU seconds differ
# by what is measured alone.
REPEATABLE = (
    "sluice.asynchrony.max_staleness=0",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000",
    "trainer.save_freq=0",
    "trainer.logger=['jsonl']",
)
_LOOK_S, _STEP_TIMEOUT_S, _END_TIMEOUT_S = 0.02, 300.0, 60.0


@contextmanager
def _span_sink() -> Iterator[Sequence[str]]:
    """A collector in a process of its own; the overrides that send spans there."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.span_sink"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sink:
        assert sink.stdout is not None
        try:
            port = int(sink.stdout.readline())
            yield [f"sluice.telemetry.traces.endpoint=http://127.0.0.1:{port}"]
        finally:
            sink.kill()


@contextmanager
def _both(folder: Path) -> Iterator[Sequence[str]]:
    with ExitStack() as stack:
        yield [*stack.enter_context(_span_sink()), *stack.enter_context(scraped_run(folder))]


KINDS: Mapping[str, Callable[[Path], AbstractContextManager[Sequence[str]]]] = {
    OFF: lambda _: nullcontext(()),
    "traces": lambda _: _span_sink(),
    "metrics": scraped_run,
    BOTH: _both,
}
"""What is measured: each kind runs what it needs beside the run, whose folder it is told, and gives
the run's overrides."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds a step, and what the run itself says that telling took of them, if it was asked."""

    cpu_s: float
    wall_s: float
    told: TelemetryAccount | None = None
    record_us: float = 0.0


@dataclass(frozen=True, slots=True)
class _Point:
    """How far a run has come."""

    steps: int
    cpu_s: float
    wall_s: float
    told: TelemetryAccount | None


def main(arguments: Sequence[str]) -> int:
    """Measures; the exit status."""
    parsed = _parse(arguments)
    kinds = {name: KINDS[name] for name in (OFF, *parsed.kinds)}
    costs: dict[str, list[StepCost]] = {name: [] for name in kinds}
    for number in range(parsed.rounds):
        # Every second round in the other order: the machine's drift meets all kinds alike.
        for name in list(kinds)[:: 1 if number % 2 == 0 else -1]:
            with kinds[name](parsed.output / name) as overrides:
                cost = _measure(parsed, name, [*overrides, *parsed.overrides])
            costs[name].append(cost)
            _say(f"round {number + 1}, {name}: {cost.cpu_s:.3f} s CPU, {cost.wall_s:.3f} s a step")
    figures = report(costs)
    if any(cost.told for cost in costs.get(BOTH, ())):
        figures = shares(costs[BOTH]) | figures
    _say(json.dumps(figures))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures what telling about a run costs the run.",
        epilog="example: python benchmarks/bench_telemetry.py --kinds traces both --rounds 3",
    )
    others = [name for name in KINDS if name != OFF]
    parser.add_argument("--kinds", nargs="+", choices=others, default=[BOTH])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=12, help="steps that count")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "telemetry")
    parser.add_argument("--overrides", nargs="*", default=list(REPEATABLE))
    return parser.parse_args(arguments)


def report(costs: Mapping[str, Sequence[StepCost]]) -> dict[str, object]:
    """The figures of all rounds, of which each kind has one a round."""
    found: dict[str, object] = {}
    for name, measured in costs.items():
        if name == OFF:
            continue
        pairs = list(zip(measured, costs[OFF], strict=True))
        rounds = [with_.cpu_s / without.cpu_s - 1 for with_, without in pairs]
        walls = [with_.wall_s / without.wall_s - 1 for with_, without in pairs]
        found |= {
            f"overhead_{name}": round(median(rounds), 4),
            f"overhead_{name}_wall": round(median(walls), 4),
            f"overhead_{name}_rounds": [round(one, 4) for one in rounds],
        }
    cpu = {name: round(median(c.cpu_s for c in measured), 4) for name, measured in costs.items()}
    wall = {name: round(median(c.wall_s for c in measured), 4) for name, measured in costs.items()}
    return {**found, "cpu_s": cpu, "wall_s": wall}


def shares(costs: Sequence[StepCost]) -> dict[str, object]:
    """What telling took of the CPU of runs that were asked, one a round."""
    asked = [(cost, cost.told) for cost in costs if cost.told]
    traces = [(told.spans_cpu_s + told.spans * c.record_us / 1e6) / c.cpu_s for c, told in asked]
    metrics = [told.scrapes_cpu_s / cost.cpu_s for cost, told in asked]
    return {
        "share_traces": round(median(traces), 4),
        "share_metrics": round(median(metrics), 4),
        "share_traces_rounds": [round(one, 4) for one in traces],
        "share_metrics_rounds": [round(one, 4) for one in metrics],
        "record_us": median(cost.record_us for cost, _ in asked),
        "spans_a_step": round(median(told.spans for _, told in asked)),
    }


def _measure(parsed: argparse.Namespace, name: str, overrides: Sequence[str]) -> StepCost:
    """One run."""
    folder = parsed.output / name
    _share_assets(parsed.output / "assets", folder)
    steps = parsed.warm_up + parsed.steps
    command = [sys.executable, "-m", "sluice.cli.main", "quickstart", "--run-dir", str(folder)]
    # More steps than are measured: the run is ended while it trains.
    command += [*overrides, f"trainer.total_training_steps={2 * steps}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        began = _at_step(run, folder, parsed.warm_up)
        ended = _at_step(run, folder, steps)
    finally:
        run.terminate()
        run.wait(_END_TIMEOUT_S)
    count = ended.steps - began.steps
    cpu_s, wall_s = (ended.cpu_s - began.cpu_s) / count, (ended.wall_s - began.wall_s) / count
    if began.told is None or ended.told is None:
        return StepCost(cpu_s, wall_s)
    return StepCost(cpu_s, wall_s, ended.told.since(began.told).over(count), record_us())


def _at_step(run: subprocess.Popen[bytes], folder: Path, step: int) -> _Point:
    """Where the run is when at least `step` steps have ended."""
    path, ends_s = folder / "metrics.jsonl", time.monotonic() + _STEP_TIMEOUT_S
    while run.poll() is None and time.monotonic() < ends_s:
        rows = path.read_bytes().count(b"\n") if path.exists() else 0
        if rows >= step:
            return _Point(rows, cpu_seconds(run.pid), time.monotonic(), telemetry_account(folder))
        time.sleep(_LOOK_S)
    raise RuntimeError(f"the run in {folder} never reached step {step}; its logs are there")


def _share_assets(assets: Path, folder: Path) -> None:
    """Model and data are made once; the run begins in an empty folder."""
    prepare(assets, task="quickstart", seed=0, progress=_silent)
    if folder.exists():
        shutil.rmtree(folder)
    claim_folder(folder)
    shutil.copytree(assets, folder / "assets")


def _silent(_progress: PrepareProgress) -> None:
    """The making of the model takes under a minute."""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
