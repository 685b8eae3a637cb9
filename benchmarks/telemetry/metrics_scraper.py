"""A stand-in for Prometheus: reads the metrics of a run's processes, more often than one would,
and what they say that telling has cost them."""

from __future__ import annotations

import json
import random
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from sluice.telemetry.metrics_page import FOLDER, PATH
from sluice.telemetry.process import TelemetryPart

INTERVAL_S = 5.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TelemetryAccount:
    """What processes of a run together have spent on telling about it.

    Attributes:
        processes: their names.
        spans_cpu_s: CPU seconds of the threads that send spans.
        scrapes_cpu_s: of those that answer scrapes.
        spans: recorded.
    """

    processes: frozenset[str]
    spans_cpu_s: float
    scrapes_cpu_s: float
    spans: float

    def since(self, before: TelemetryAccount) -> TelemetryAccount:
        """What came after `before`.

        Raises:
            RuntimeError: a process answered only one of the two times.
        """
        if self.processes != before.processes:
            raise RuntimeError(
                f"metrics came from {sorted(before.processes)} and then from "
                f"{sorted(self.processes)}; repeat the benchmark"
            )
        pairs = zip(astuple(self)[1:], astuple(before)[1:], strict=True)
        return TelemetryAccount(self.processes, *(now - then for now, then in pairs))


def telemetry_account(run_dir: Path) -> TelemetryAccount:
    """What a run's processes say.

    Raises:
        RuntimeError: none serves metrics.
    """
    cpu_s = dict.fromkeys(TelemetryPart, 0.0)
    spans, processes = 0.0, set[str]()
    for name, page in _pages(run_dir):
        processes.add(name)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "sluice_telemetry_cpu_seconds_total":
                    cpu_s[TelemetryPart(sample.labels["part"])] += sample.value
                elif sample.name == "sluice_telemetry_spans_total":
                    spans += sample.value
    if not processes:
        raise RuntimeError(f"no process of the run in {run_dir} serves metrics")
    return TelemetryAccount(
        frozenset(processes), cpu_s[TelemetryPart.SPANS], cpu_s[TelemetryPart.SCRAPES], spans
    )


@contextmanager
def scraped_run(run_dir: Path, is_wanted: Callable[[], bool]) -> Iterator[Sequence[str]]:
    """Read every process of a run every `INTERVAL_S` seconds, give or take the half.

    Args:
        run_dir: the run's folder.
        is_wanted: asked before each time.

    Yields:
        The overrides that have the processes serve metrics.
    """
    over = threading.Event()
    scraping = threading.Thread(target=_scrape, args=(run_dir, is_wanted, over), daemon=True)
    scraping.start()
    try:
        yield [
            f"sluice.{kind}.endpoint.metrics_port=0" for kind in ("trainer", "reward", "rollout")
        ]
    finally:
        over.set()
        scraping.join()


def _scrape(run_dir: Path, is_wanted: Callable[[], bool], over: threading.Event) -> None:
    # At random, so that scrapes do not fall in step with what is measured.
    while not over.wait(random.uniform(0.5, 1.5) * INTERVAL_S):
        for _ in _pages(run_dir) if is_wanted() else ():
            pass


def _pages(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Name and page of every process that answers."""
    for file in (run_dir / FOLDER).glob("*.json"):
        try:
            (group,) = json.loads(file.read_text(encoding="utf-8"))
            url = f"http://{group['targets'][0]}{PATH}"
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                yield file.stem, answer.read().decode()
        except OSError:  # the run begins or ends
            continue
