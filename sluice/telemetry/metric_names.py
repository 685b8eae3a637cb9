"""The table of metrics, `metric_names.toml`, and the names that several modules read."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

import msgspec

STEP = "training/global_step"
"""A row of metrics.jsonl with this name is a step's; others are validations."""
REWARD = "critic/rewards/mean"
GROUPS_KEPT = "train/groups_kept"
GROUPS_ALL_RIGHT = "train/groups_all_right"
GROUPS_ALL_WRONG = "train/groups_all_wrong"
GENERATED_TOKENS = "train/generated_tokens"
TRAINED_TOKENS = "train/trained_tokens"
STALENESS_MEAN = "train/staleness_mean"
STALENESS_MAX = "train/staleness_max"
TOKENS_PER_S = "rollout/tokens_per_s"
TRAINER_IDLE = "trainer/idle_share"
ROLLOUT_IDLE = "rollout/idle_share"
STEP_S = "timing_s/step"
WAIT_BATCH_S = "timing_s/wait_batch"
WAIT_GROUPS_S = "timing_s/wait_groups"
ACCOUNTS = "accounts/"
"""Before the names of `accounts.json`."""
VAL_CORE = "val-core/"
"""Before source, variable and statistic."""


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name, or a family of names, in metrics.jsonl or in the reward service's status.

    The head of `metric_names.toml` explains the fields.
    """

    name: str
    unit: str
    meaning: str
    emitted: str = "every step"
    absent: str = ""


class InstrumentKind(StrEnum):
    """Kinds of exported metrics. A counter never falls while the thing that it counts lives."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Instrument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric that a process exports to Prometheus, without its value.

    The head of `metric_names.toml` explains the fields.
    """

    name: str
    unit: str
    meaning: str
    row: str = ""
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    may_restart: bool = False

    @property
    def kind(self) -> InstrumentKind:
        """Return the kind, which name and bounds determine."""
        if self.bounds:
            return InstrumentKind.HISTOGRAM
        is_counter = self.name.endswith("_total")
        return InstrumentKind.COUNTER if is_counter else InstrumentKind.GAUGE

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names that a query can use: a histogram has three."""
        if not self.bounds:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


@cache
def metrics() -> Mapping[str, tuple[Metric, ...]]:
    """Return all metrics of a run by the title of their section."""
    return {
        section["title"]: tuple(
            msgspec.convert({**section.get("defaults", {}), "name": name, **row}, Metric)
            for name, row in section["rows"].items()
        )
        for section in _load_table()["run"]
    }


def find_metric(name: str) -> Metric | None:
    """Return the row that describes a metric of a run; ``None``: there is none."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    rows = [metric for section in metrics().values() for metric in section if not metric.absent]
    return tuple((_pattern(metric.name), metric) for metric in rows)


def _pattern(family: str) -> re.Pattern[str]:
    """Return what the names of a family match: `{a,b}` is one of them, `<x>` any text."""
    text = re.escape(family)
    text = re.sub(r"\\\{(.*?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", text)
    return re.compile(re.sub(r"<.*?>", ".+", text))


@cache
def instruments() -> Mapping[str, tuple[Instrument, ...]]:
    """Return all exported metrics by the process that exports them."""
    units = {metric.name: metric.unit for section in metrics().values() for metric in section}
    return {
        section["process"]: tuple(
            msgspec.convert({"unit": units.get(row.get("row")), "name": name, **row}, Instrument)
            for name, row in section["rows"].items()
        )
        for section in _load_table()["prometheus"]
    }


@cache
def instrument(name: str) -> Instrument:
    """Return an exported metric.

    Raises:
        LookupError: it has no row.
    """
    for section in instruments().values():
        for entry in section:
            if entry.name == name:
                return entry
    raise LookupError(f"{name}: no such metric; add a row to sluice/telemetry/metric_names.toml")


def exported_rows(process: str) -> Mapping[str, str]:
    """Return the rows whose newest value a process exports, with the exported names."""
    return {exported.row: exported.name for exported in instruments()[process] if exported.row}


def _load_table() -> dict[str, Any]:
    file = resources.files(__package__).joinpath("metric_names.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
