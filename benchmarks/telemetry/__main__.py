"""Measure what traces and metrics cost a run; `make bench-telemetry`.

The quickstart's job trains twice: once with spans of the default share of prompts, once with those
of every prompt. A collector receives the spans, and every process is scraped every 5 s, three times
as often as Prometheus does as shipped. The learning rate is next to nothing, so steps stay alike.

A run reports the CPU time of its threads that send spans and answer scrapes, by their own clocks.
The time to record spans is their number times what one takes here. Printed last is one JSON object:

share_traces      of the run's CPU: recording and sending spans, default share of prompts
share_traces_all  the same with spans of every prompt
share_metrics     of the run's CPU: answering scrapes
record_us         CPU microseconds to record a span
spans_a_step, cpu_s_a_step    by share of prompts
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from benchmarks.reporting import ROOT, empty_run_folder, print_line, print_report
from sluice.concurrency.process import stat_fields
from sluice.config.schema.service import TracesConfig
from sluice.report.run_record import read_progress
from sluice.telemetry.metrics import TelemetryPart
from sluice.telemetry.otel import BATCH
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanName, Timestamp
from tests.support.scraped import fetch, parsed, targets
from tests.support.seen_spans import collector, traced
from tools.commands import started
from tools.phases import tool_parser, until

SETTINGS = f"@{Path(__file__).with_name('run.overrides')}"
_STEP_TIMEOUT_S, _SCRAPE_INTERVAL_S = 300.0, 5.0
_NUM_SPANS, _NUM_PROCESSES = "num_spans", "num_processes"
_COUNT, _REPEATS = 10 * BATCH, 9


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.telemetry --steps 60")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=56, help="steps that count, of each run")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "telemetry", help="runs go here"
    )
    parsed = parser.parse_args(arguments)
    if min(parsed.warm_up, parsed.steps) < 1:
        parser.error("--warm-up and --steps have to be 1 at least")
    recording_us = _record_us()
    default = TracesConfig().sample_ratio
    runs = {ratio: _run(parsed, ratio, recording_us) for ratio in (default, 1.0)}
    return print_report(
        {
            "share_traces": runs[default]["share_traces"],
            "share_traces_all": runs[1.0]["share_traces"],
            "share_metrics": runs[default]["share_metrics"],
            "record_us": recording_us,
            "spans_a_step": {f"{ratio:g}": found["spans"] for ratio, found in runs.items()},
            "cpu_s_a_step": {f"{ratio:g}": found["cpu_s"] for ratio, found in runs.items()},
        }
    )


def _record_us() -> float:
    """Return the CPU microseconds of this thread to record a span, the median of nine times."""
    found = []
    with traced():
        for _ in range(_REPEATS):
            began_s = time.thread_time()
            with TRACER.trace(SpanName.SERVE, is_always=True) as serve:
                assert serve.context is not None
                began = Timestamp.now()
                for index in range(_COUNT):  # of samples, as most are
                    ended: dict[str, str | int] = {
                        SpanAttribute.SAMPLE_INDEX: index,
                        SpanAttribute.NUM_TOKENS: 100,
                    }
                    ended |= {SpanAttribute.FINISH_REASON: "stop", SpanAttribute.VERSION: 1}
                    TRACER.past(serve.context, SpanName.SAMPLE, began, ended)
            found.append((time.thread_time() - began_s) / _COUNT * 1e6)
    return round(median(found), 2)


def _run(parsed: argparse.Namespace, sample_ratio: float, recording_us: float) -> dict[str, float]:
    """Train one run; return the figures of its steps after the warm-up."""
    folder = parsed.output / "run"
    empty_run_folder(folder, parsed.output / "assets", "quickstart", seed=0)
    last = parsed.warm_up + parsed.steps
    command = [sys.executable, "-m", "sluice.cli.main", "quickstart", "--run-dir", str(folder)]
    # More steps than are measured: the run ends while it trains.
    command += [SETTINGS, f"trainer.total_training_steps={2 * last}"]
    command.append(f"sluice.telemetry.traces.sample_ratio={sample_ratio}")
    with collector() as sink, _scraped_run(folder) as overrides:
        command += [f"sluice.telemetry.traces.endpoint={sink.address}", *overrides]
        with started(command, folder / "up.log") as run:
            first = _wait_for_step(run, folder, parsed.warm_up)
            cpu_before_s, before = _cpu_seconds(run.pid), _telemetry_account(folder)
            num_steps = _wait_for_step(run, folder, last) - first
            cpu_s = _cpu_seconds(run.pid) - cpu_before_s
            now = _telemetry_account(folder)
    if not now[_NUM_PROCESSES] == before[_NUM_PROCESSES] > 0:
        raise RuntimeError("processes of the run came or went; repeat the benchmark")
    spent = {figure: value - before[figure] for figure, value in now.items()}
    spans_s = spent[TelemetryPart.SPANS] + spent[_NUM_SPANS] * recording_us / 1e6
    found = {
        "share_traces": round(spans_s / cpu_s, 4),
        "share_metrics": round(spent[TelemetryPart.SCRAPES] / cpu_s, 4),
        "spans": round(spent[_NUM_SPANS] / num_steps, 1),
        "cpu_s": round(cpu_s / num_steps, 3),
    }
    print_line(f"spans of {sample_ratio:.0%} of all prompts: {found}")
    return found


def _wait_for_step(run: subprocess.Popen[bytes], folder: Path, step: int) -> int:
    """Return the number of the latest step once `step` has ended.

    Raises:
        RuntimeError: the run ended before.
        PhaseError: it takes more than five minutes a step.
    """

    def has_ended() -> bool:
        if run.poll() is not None:
            raise RuntimeError(f"the run in {folder} ended before step {step}; see its logs")
        return len(read_progress(folder).steps) >= step

    until(f"step {step}", has_ended, timeout_s=_STEP_TIMEOUT_S * step)
    return len(read_progress(folder).steps)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants so far, from the kernel's accounts.

    Ended ones are included where their parent has waited for them.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := stat_fields(int(entry.name)):
            # Parent, own time and that of ended children.
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    found, total = [pid], 0
    for member in found:
        total += ticks.get(member, 0)
        found += children.get(member, [])
    return total / os.sysconf("SC_CLK_TCK")


def _telemetry_account(run_dir: Path) -> dict[str, float]:
    """Return what a run's processes have spent on telemetry, by their own metrics.

    CPU seconds of the threads that send spans and of those that answer scrapes, by part; spans; and
    how many processes reported.
    """
    account: dict[str, float] = defaultdict(float)
    for page in _pages(run_dir):
        account[_NUM_PROCESSES] += 1
        for (name, labels), value in parsed(page).items():
            if name == "sluice_telemetry_cpu_seconds_total":
                account[dict(labels)["part"]] += value
            elif name == "sluice_telemetry_spans_total":
                account[_NUM_SPANS] += value
    return account


@contextmanager
def _scraped_run(run_dir: Path) -> Iterator[Sequence[str]]:
    """Read every process of a run every `_SCRAPE_INTERVAL_S` seconds, plus or minus half of that.

    Yields:
        The overrides with which the processes serve metrics.
    """
    over = threading.Event()
    scraping = threading.Thread(target=_scrape, args=(run_dir, over), daemon=True)
    scraping.start()
    try:
        yield [
            f"sluice.{kind}.endpoint.metrics_port=0" for kind in ("trainer", "reward", "rollout")
        ]
    finally:
        over.set()
        scraping.join()


def _scrape(run_dir: Path, over: threading.Event) -> None:
    # At random, so that scrapes do not fall in step with what is measured.
    while not over.wait(random.uniform(0.5, 1.5) * _SCRAPE_INTERVAL_S):
        for _ in _pages(run_dir):
            pass


def _pages(run_dir: Path) -> Iterator[str]:
    """Yield the pages of the processes that answer, up to the first that does not."""
    with suppress(OSError):  # the run begins or ends
        for address in targets(run_dir).values():
            yield fetch(address)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
