"""Measure what traces and metrics cost a run; `make bench-telemetry`.

The quickstart's job trains at a learning rate of next to nothing, so that its steps stay alike,
and telemetry is on for eight of its steps and off for eight, in turns. The first two of each turn
are not measured, since their prompts were accepted before, and spans leave a second later. Equal
runs one after the other differ by 5 % and more on a shared machine; steps side by side show less.
On means: the spans of the prompts that are sampled go to a collector, and every process is scraped
every 5 s, three times as often as Prometheus does as shipped. What the switch adds to a step of so
many tokens is fitted by least squares (`step_regression`), to the CPU of all of the
run's processes and to the clock, for whose two cores collector and scraper compete with the run.

The run is also asked what it spent: what its threads that send spans and answer scrapes took, by
their own clocks, and its spans times what `span_cost` measures for recording one.
Printed last is one JSON object:

overhead        CPU seconds a step that telemetry adds, over those of a step; mean of the rounds
overhead_wall   the same of seconds on the clock
overhead_error, overhead_wall_error    standard errors of these means, by the steps' scatter or by
                the rounds', whichever is more
overhead_rounds, overhead_wall_rounds
sample_ratio    the share of prompts whose spans are recorded: the default, or --sample-ratio
share_traces    of the CPU of steps with telemetry: sending spans, and recording them; median
share_traces_all    the same with the spans of every prompt: share_traces over sample_ratio
share_metrics   of that CPU: answering scrapes; median
record_us       CPU microseconds to record a span; median
spans_a_step    in steps with telemetry; median
cpu_s, wall_s   means of a step; medians
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.reporting import ROOT, print_line
from benchmarks.telemetry.metrics_scraper import TelemetryAccount, scraped_run, telemetry_account
from benchmarks.telemetry.process_cpu import cpu_seconds
from benchmarks.telemetry.span_cost import record_us
from benchmarks.telemetry.step_regression import MeasuredStep, added
from sluice.cli.run.quickstart import mark_run_folder
from sluice.config.schema.service import TracesConfig
from sluice.quickstart.prepare import prepare
from sluice.quickstart.settings import PrepareProgress

SETTINGS = (
    "sluice.asynchrony.max_staleness=0",
    "actor_rollout_ref.actor.optim.lr=1e-9",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000000",
    "trainer.save_freq=0",
    "trainer.logger=['jsonl']",
)
_TURN, _SETTLING = 8, 2  # steps
_LOOK_S, _STEP_TIMEOUT_S, _END_TIMEOUT_S = 0.02, 300.0, 60.0
_SWITCH = "SLUICE_BENCH_TRACING_SWITCH"
_GENERATED, _TRAINED = "accounts/generated_tokens", "perf/total_num_tokens"


class Switch:
    """Telemetry of one run, on while a file exists; the scraper asks, the run's processes look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.turn(on=True)

    def turn(self, *, on: bool) -> None:
        """Turns it."""
        if on:
            self._path.touch()
        else:
            self._path.unlink(missing_ok=True)

    def is_on(self) -> bool:
        """Whether telemetry is wanted now."""
        return self._path.exists()

    @property
    def environment(self) -> dict[str, str]:
        """Of the run's processes."""
        folders = [
            str(ROOT / "benchmarks" / "telemetry" / "toggled_tracing"),
            os.environ.get("PYTHONPATH", ""),
        ]
        path = os.pathsep.join(filter(None, folders))
        return {**os.environ, "PYTHONPATH": path, _SWITCH: str(self._path)}


@dataclass(slots=True)
class RoundFigures:
    """What is measured at the end of each step of one run, by the step's number."""

    cpu_s: dict[int, float] = field(default_factory=dict)
    wall_s: dict[int, float] = field(default_factory=dict)
    is_on: dict[int, bool] = field(default_factory=dict)

    def steps(
        self, seconds: Mapping[int, float], rows: Sequence[Mapping[str, float]], first: int
    ) -> list[MeasuredStep]:
        """Settled steps from `first` on whose both ends were seen, by one of the two clocks."""
        return [
            MeasuredStep(
                seconds[number] - seconds[number - 1],
                self.is_on[number],
                rows[number - 1][_GENERATED] - rows[number - 2][_GENERATED],
                rows[number - 1][_TRAINED],
            )
            for number in range(first, len(rows) + 1)
            if number in seconds and number - 1 in seconds and self._is_settled(number)
        ]

    def _is_settled(self, number: int) -> bool:
        since = range(number - _SETTLING, number + 1)
        return len({self.is_on.get(step) for step in since}) == 1 and number in self.is_on


@contextmanager
def _span_sink() -> Iterator[str]:
    """A collector in a process of its own; the override that sends spans there."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.telemetry.span_sink"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sink:
        assert sink.stdout is not None
        try:
            port = int(sink.stdout.readline())
            yield f"sluice.telemetry.traces.endpoint=http://127.0.0.1:{port}"
        finally:
            sink.kill()


@contextmanager
def reported_run(folder: Path, switch: Switch) -> Iterator[Sequence[str]]:
    """A collector and a scraper; the overrides that have a run tell both of itself."""
    with ExitStack() as stack:
        endpoint = stack.enter_context(_span_sink())
        yield [endpoint, *stack.enter_context(scraped_run(folder, switch.is_on))]


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parsed = _parse(arguments)
    rounds = []
    for number in range(1, parsed.rounds + 1):
        figures = _round(parsed)
        rounds.append(figures)
        print_line(
            f"round {number}: telemetry adds {figures['overhead']:+.1%} of CPU "
            f"(standard error {figures['overhead_error']:.1%})"
        )
    print_line(json.dumps(report(rounds)))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures what telling about a run costs the run.",
        epilog="example: python -m benchmarks.telemetry --rounds 1 --steps 60",
    )
    parser.add_argument("--rounds", type=int, default=4, help="runs, one after the other")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=112, help="steps that count")
    parser.add_argument(
        "--sample-ratio",
        type=float,
        default=TracesConfig().sample_ratio,
        help="share of prompts that are recorded",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "telemetry", help="runs go here"
    )
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.sample_ratio <= 1:
        parser.error("--sample-ratio has to be above 0 and at most 1")
    if parsed.rounds < 1 or parsed.warm_up < 1:
        parser.error("--rounds and --warm-up have to be 1 at least")
    if parsed.steps < 2 * _TURN:
        parser.error(f"--steps {parsed.steps}: give {2 * _TURN} at least, a turn on and one off")
    return parsed


def report(rounds: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Medians of the rounds; of the overheads means, with their errors, and each round."""
    found: dict[str, object] = {
        name: round(median(one[name] for one in rounds), 4) for name in rounds[0]
    }
    for name in ("overhead", "overhead_wall"):
        each = [one[name] for one in rounds]
        by_steps = math.sqrt(sum(one[f"{name}_error"] ** 2 for one in rounds)) / len(rounds)
        by_rounds = stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
        found[name] = round(fmean(each), 4)
        found[f"{name}_error"] = round(max(by_steps, by_rounds), 4)
        found[f"{name}_rounds"] = [round(one, 4) for one in each]
    return found


def _round(parsed: argparse.Namespace) -> dict[str, float]:
    folder = parsed.output / "run"
    _share_assets(parsed.output / "assets", folder)
    switch = Switch(parsed.output / "telemetry_is_on")
    with reported_run(folder, switch) as overrides:
        sampled = f"sluice.telemetry.traces.sample_ratio={parsed.sample_ratio}"
        seen, reported, rows = _watched(parsed, folder, switch, [*overrides, sampled])
    first = parsed.warm_up + 1
    cpu, wall = seen.steps(seen.cpu_s, rows, first), seen.steps(seen.wall_s, rows, first)
    by_cpu, by_wall = added(cpu), added(wall)
    figures = {
        "overhead": by_cpu.share,
        "overhead_wall": by_wall.share,
        "overhead_error": by_cpu.error,
        "overhead_wall_error": by_wall.error,
        "cpu_s": fmean(step.seconds for step in cpu),
        "wall_s": fmean(step.seconds for step in wall),
    }
    on_s = sum(
        seen.cpu_s[number] - seen.cpu_s[number - 1]
        for number, is_on in seen.is_on.items()
        if is_on and number >= first and {number, number - 1} <= seen.cpu_s.keys()
    )
    num_on = sum(is_on for number, is_on in seen.is_on.items() if first <= number <= len(rows))
    own = shares(reported, on_s, num_on, record_us())
    ratio = parsed.sample_ratio
    return (
        figures
        | own
        | {
            "sample_ratio": ratio,
            "share_traces_all": own["share_traces"] / ratio,
        }
    )


def shares(
    reported: TelemetryAccount, cpu_s: float, num_steps: int, recording_us: float
) -> dict[str, float]:
    """What telling took of the `cpu_s` of all the steps in which it was on."""
    return {
        "share_traces": (reported.spans_cpu_s + reported.spans * recording_us / 1e6) / cpu_s,
        "share_metrics": reported.scrapes_cpu_s / cpu_s,
        "record_us": recording_us,
        "spans_a_step": reported.spans / num_steps,
    }


def _watched(
    parsed: argparse.Namespace, folder: Path, switch: Switch, overrides: Sequence[str]
) -> tuple[RoundFigures, TelemetryAccount, list[dict[str, float]]]:
    """One run to the last step that counts; telemetry's own account starts after the warm-up."""
    last = parsed.warm_up + parsed.steps
    command = [sys.executable, "-m", "sluice.cli.main", "quickstart", "--run-dir", str(folder)]
    # More steps than are measured: the run is ended while it trains.
    command += [*SETTINGS, *overrides, f"trainer.total_training_steps={2 * last}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=switch.environment)
    seen, began = RoundFigures(), None
    try:
        for number in _ended_steps(run, folder, last):
            seen.cpu_s[number], seen.wall_s[number] = cpu_seconds(run.pid), time.monotonic()
            seen.is_on[number + 1] = number // _TURN % 2 == 0
            switch.turn(on=seen.is_on[number + 1])
            if began is None and number >= parsed.warm_up:
                began = telemetry_account(folder)
        assert began is not None
        reported = telemetry_account(folder).since(began)
    finally:
        run.terminate()
        try:
            run.wait(_END_TIMEOUT_S)
        finally:
            run.kill()
    return seen, reported, _rows(folder)[:last]


def _ended_steps(run: subprocess.Popen[bytes], folder: Path, last: int) -> Iterator[int]:
    """The number of the latest step, each time one has ended, to `last`."""
    seen, ends_s = 0, time.monotonic() + _STEP_TIMEOUT_S
    while seen < last:
        if run.poll() is not None or time.monotonic() >= ends_s:
            raise RuntimeError(f"the run in {folder} never ended step {seen + 1}; see its logs")
        path = folder / "metrics.jsonl"
        number = path.read_bytes().count(b"\n") if path.exists() else 0
        if number > seen:
            seen, ends_s = number, time.monotonic() + _STEP_TIMEOUT_S
            yield seen
        time.sleep(_LOOK_S)


def _rows(folder: Path) -> list[dict[str, float]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _share_assets(assets: Path, folder: Path) -> None:
    """Model and data are made once; the run begins in an empty folder."""
    prepare(assets, task="quickstart", seed=0, progress=_silent)
    if folder.exists():
        shutil.rmtree(folder)
    mark_run_folder(folder)
    shutil.copytree(assets, folder / "assets")


def _silent(_progress: PrepareProgress) -> None:
    """The making of the model takes under a minute."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
