"""A stand-in for Prometheus: reads the metrics of a run's processes, more often than one would,
and the costs of telemetry that they report."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sluice.telemetry.metrics_page import FOLDER, PATH

INTERVAL_S = 5.0
NUM_SPANS, NUM_PROCESSES = "num_spans", "num_processes"
_TIMEOUT_S = 10.0


def telemetry_account(run_dir: Path) -> dict[str, float]:
    """Return what a run's processes have spent on telemetry, by their own metrics.

    CPU seconds of the threads that send spans and of those that answer scrapes, by part; spans; and
    how many processes reported.
    """
    account: dict[str, float] = defaultdict(float)
    for page in _pages(run_dir):
        account[NUM_PROCESSES] += 1
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "sluice_telemetry_cpu_seconds_total":
                    account[sample.labels["part"]] += sample.value
                elif sample.name == "sluice_telemetry_spans_total":
                    account[NUM_SPANS] += sample.value
    return account


@contextmanager
def scraped_run(run_dir: Path) -> Iterator[Sequence[str]]:
    """Read every process of a run every `INTERVAL_S` seconds, plus or minus half of that.

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
    while not over.wait(random.uniform(0.5, 1.5) * INTERVAL_S):
        for _ in _pages(run_dir):
            pass


def _pages(run_dir: Path) -> Iterator[str]:
    """Yield the page of every process that answers."""
    for file in (run_dir / FOLDER).glob("*.json"):
        try:
            (group,) = json.loads(file.read_text(encoding="utf-8"))
            url = f"http://{group['targets'][0]}{PATH}"
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                yield answer.read().decode()
        except OSError:  # the run begins or ends
            continue
