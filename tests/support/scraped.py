"""Pages of metrics, read as Prometheus reads them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from sluice.telemetry.metrics import FOLDER

PROCESS_NAMES = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
"""Metrics that prometheus_client's own collector adds, as in every program that uses it."""
Labels = tuple[tuple[str, str], ...]
Page = Mapping[tuple[str, Labels], float]


def fetch(address: str, path: str = "/metrics") -> str:
    """What a process answers at host:port."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=300) as answer:
        return str(answer.read().decode("utf-8"))


def parsed(text: str) -> Page:
    """Values by name and labels, as the vendor's own parser finds them."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(page: Page, name: str, **labels: str) -> float:
    """The one value with these labels."""
    return page[(name, tuple(sorted(labels.items())))]


def names(page: Page) -> set[str]:
    """Every name on a page."""
    return {name for name, _ in page}


def targets(run_dir: Path) -> dict[str, str]:
    """Addresses by the name of the process, as the run's folder lists them."""
    found = {}
    for file in sorted((run_dir / FOLDER).glob("*.json")):
        (group,) = json.loads(file.read_text(encoding="utf-8"))
        (address,) = group["targets"]
        found[group["labels"]["name"]] = address
    return found
