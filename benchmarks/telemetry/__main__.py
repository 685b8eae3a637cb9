"""Measure what traces and metrics cost a run; `make bench-telemetry`.

The quickstart's job trains at a learning rate of next to nothing, so that its steps stay alike,
and telemetry is on for eight of its steps and off for eight, in turns. The first two of each turn
are not measured, since their prompts were accepted before, and spans leave a second later. Equal
runs one after the other differ by 5 % and more on a shared machine; steps side by side show less.
On means: the spans of the prompts that are sampled go to a collector, and every process is scraped
every 5 s, three times as often as Prometheus does as shipped. What the switch adds to a step of so
many tokens is fitted by least squares (`step_regression`), to the CPU of all of the
run's processes and to the clock, for whose two cores collector and scraper compete with the run.

The run also reports what it spent: the time of its threads that send spans and answer scrapes, by
their own clocks. Its spans count times what `span_cost` measures for recording one.
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
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.reporting import ROOT, empty_run_folder, print_line, print_report
from benchmarks.telemetry.metrics_scraper import (
    NUM_SPANS,
    scraped_run,
    spent_since,
    telemetry_account,
)
from benchmarks.telemetry.span_cost import record_us
from benchmarks.telemetry.span_sink import span_sink
from benchmarks.telemetry.step_regression import Step, added
from sluice.config.schema.service import TracesConfig
from sluice.report.run_record import Row, read_progress
from sluice.telemetry.process import TelemetryPart
from tools.commands import started

SETTINGS = (
    "sluice.asynchrony.max_staleness=0",
    "actor_rollout_ref.actor.optim.lr=1e-9",
    "trainer.val_before_train=false",
    "trainer.test_freq=1000000",
    "trainer.save_freq=0",
    "trainer.logger=['jsonl']",
)
_TURN, _SETTLING = 8, 2  # steps
_LOOK_S, _STEP_TIMEOUT_S = 0.02, 300.0
_SWITCH = "SLUICE_BENCH_TRACING_SWITCH"
_GENERATED, _TRAINED = "accounts/generated_tokens", "perf/total_num_tokens"


@dataclass(slots=True)
class RoundFigures:
    """What is measured at the end of each step of one run, by the step's number."""

    cpu_s: dict[int, float] = field(default_factory=dict)
    wall_s: dict[int, float] = field(default_factory=dict)
    is_on: dict[int, bool] = field(default_factory=dict)

    def steps(self, seconds: Mapping[int, float], rows: Sequence[Row], first: int) -> list[Step]:
        """Return settled steps from `first` on with both ends seen, by one of the two clocks."""
        return [
            Step(
                seconds[number] - seconds[number - 1],
                self.is_on[number],
                (rows[number - 1][_GENERATED] or 0.0) - (rows[number - 2][_GENERATED] or 0.0),
                rows[number - 1][_TRAINED] or 0.0,
            )
            for number in range(first, len(rows) + 1)
            if number in seconds and number - 1 in seconds and self._is_settled(number)
        ]

    def _is_settled(self, number: int) -> bool:
        since = range(number - _SETTLING, number + 1)
        return len({self.is_on.get(step) for step in since}) == 1 and number in self.is_on


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
    return print_report(report(rounds))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures what traces and metrics cost a run.",
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
    """Return medians of the rounds; of the overheads means, their errors, and each round."""
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
    """Train one run, and return the figures of its settled steps."""
    folder, switch = parsed.output / "run", parsed.output / "telemetry_is_on"
    empty_run_folder(folder, parsed.output / "assets", "quickstart", seed=0)
    with span_sink() as endpoint, scraped_run(folder, switch.exists) as overrides:
        traces = "sluice.telemetry.traces"
        sampled = f"{traces}.sample_ratio={parsed.sample_ratio}"
        settings = [f"{traces}.endpoint={endpoint}", sampled, *overrides]
        seen, spent, rows = _watched(parsed, folder, switch, settings)
    first = parsed.warm_up + 1
    cpu, wall = seen.steps(seen.cpu_s, rows, first), seen.steps(seen.wall_s, rows, first)
    by_cpu, by_wall = added(cpu), added(wall)
    on = [number for number, is_on in seen.is_on.items() if is_on and number >= first]
    on_s = sum(
        seen.cpu_s[number] - seen.cpu_s[number - 1]
        for number in on
        if {number, number - 1} <= seen.cpu_s.keys()
    )
    recording_us = record_us()
    spans_s = spent[TelemetryPart.SPANS] + spent[NUM_SPANS] * recording_us / 1e6
    return {
        "overhead": by_cpu.share,
        "overhead_wall": by_wall.share,
        "overhead_error": by_cpu.error,
        "overhead_wall_error": by_wall.error,
        "cpu_s": fmean(step.seconds for step in cpu),
        "wall_s": fmean(step.seconds for step in wall),
        "share_traces": spans_s / on_s,
        "share_metrics": spent[TelemetryPart.SCRAPES] / on_s,
        "record_us": recording_us,
        "spans_a_step": spent[NUM_SPANS] / sum(number <= len(rows) for number in on),
        "sample_ratio": parsed.sample_ratio,
        "share_traces_all": spans_s / on_s / parsed.sample_ratio,
    }


def _watched(
    parsed: argparse.Namespace, folder: Path, switch: Path, overrides: Sequence[str]
) -> tuple[RoundFigures, dict[str, float], Sequence[Row]]:
    """Train to the last step that counts; telemetry's own account starts after the warm-up.

    Telemetry is on while the file `switch` exists: the scraper and the run's processes look for it.
    """
    last = parsed.warm_up + parsed.steps
    toggled = str(ROOT / "benchmarks" / "telemetry" / "toggled_tracing")
    path = os.pathsep.join(filter(None, (toggled, os.environ.get("PYTHONPATH", ""))))
    # More steps than are measured: the run is ended while it trains.
    command = [sys.executable, "-m", "sluice.cli.main", "quickstart", "--run-dir", str(folder)]
    command += [*SETTINGS, *overrides, f"trainer.total_training_steps={2 * last}"]
    seen, before = RoundFigures(), None
    switch.touch()
    with started(command, folder / "up.log", {"PYTHONPATH": path, _SWITCH: str(switch)}) as run:
        for number in _ended_steps(run, folder, last):
            seen.cpu_s[number], seen.wall_s[number] = cpu_seconds(run.pid), time.monotonic()
            seen.is_on[number + 1] = number // _TURN % 2 == 0
            if seen.is_on[number + 1]:
                switch.touch()
            else:
                switch.unlink(missing_ok=True)
            if before is None and number >= parsed.warm_up:
                before = telemetry_account(folder)
        assert before is not None
        spent = spent_since(telemetry_account(folder), before)
    return seen, spent, read_progress(folder).steps[:last]


def _ended_steps(run: subprocess.Popen[bytes], folder: Path, last: int) -> Iterator[int]:
    """Yield the number of the latest step, each time one has ended, to `last`."""
    seen, ends_s, path = 0, time.monotonic() + _STEP_TIMEOUT_S, folder / "metrics.jsonl"
    while seen < last:
        if run.poll() is not None or time.monotonic() >= ends_s:
            raise RuntimeError(f"the run in {folder} never ended step {seen + 1}; see its logs")
        number = path.read_bytes().count(b"\n") if path.exists() else 0
        if number > seen:
            seen, ends_s = number, time.monotonic() + _STEP_TIMEOUT_S
            yield seen
        time.sleep(_LOOK_S)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants so far, from the kernel's accounts.

    Ended ones are included where their parent has waited for them.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended meanwhile
            fields = (entry / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            # Behind the command's name: parent, own time and that of ended children (proc(5)).
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    found, total = [pid], 0
    for member in found:
        total += ticks.get(member, 0)
        found += children.get(member, [])
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
