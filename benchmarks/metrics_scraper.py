"""A stand-in for Prometheus: reads the metrics of a run's processes, more often than one would."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sluice.telemetry.metrics_server import PATH
from sluice.telemetry.scrape_target import FOLDER

__all__ = ["scraped_run"]

INTERVAL_S = 1.0
_TIMEOUT_S = 10.0


@contextmanager
def scraped_run(run_dir: Path) -> Iterator[Sequence[str]]:
    """Reads every process of a run each second; the overrides that have them serve metrics."""
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
    while not over.wait(INTERVAL_S):
        for file in (run_dir / FOLDER).glob("*.json"):
            try:
                (group,) = json.loads(file.read_text(encoding="utf-8"))
                url = f"http://{group['targets'][0]}{PATH}"
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                    answer.read()
            except OSError:  # the run begins or ends
                continue
