"""Exported metrics: how they are named, and that dashboards, rules and alerts know them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from sluice.telemetry.metric_names import Instrument, InstrumentKind, instruments, metrics
from sluice.telemetry.metrics import reading
from tests.support.scraped import PROCESS_NAMES
from tests.support.source_tree import ROOT

PROFILE = ROOT / "deploy" / "observability"
ALL = [instrument for group in instruments().values() for instrument in group]
EXPORTED = {name for instrument in ALL for name in instrument.series} | set(PROCESS_NAMES)
# Names of metrics in a query: of ours, and those that every Python program has.
IN_QUERY = re.compile(r"(?<![:\w])(?:sluice|process)_\w+(?![:\w])")
RECORDED = re.compile(r"(?<!\w)run\w*:sluice_[\w:]+")
SUFFIX_BY_UNIT = {"seconds": "_seconds", "bytes": "_bytes", "share": "_ratio", "nats": "_nats"}
OF_THE_TARGET = {"job", "instance", "service", "name", "run", "le", "quantile"}


def queries(tree: Any) -> Iterator[str]:
    """Every text under the key ``expr``."""
    if isinstance(tree, dict):
        for key, inner in tree.items():
            if key == "expr" and isinstance(inner, str):
                yield inner
            else:
                yield from queries(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from queries(inner)


def rules(name: str) -> Any:
    return yaml.safe_load((PROFILE / "prometheus" / name).read_text(encoding="utf-8"))


DASHBOARDS = {
    file.name: json.loads(file.read_text(encoding="utf-8"))
    for file in sorted((PROFILE / "grafana" / "dashboards").glob("*.json"))
}
READERS = {**DASHBOARDS, **{name: rules(name) for name in ("rules.yml", "alerts.yml")}}


def test_a_name_has_one_row_and_exports_a_row_that_exists() -> None:
    twice = [name for name, count in Counter(one.name for one in ALL).items() if count > 1]
    assert twice == []
    assert len(ALL) > 80
    rows = {row.name: row.unit for section in metrics().values() for row in section}
    mirrored = [one for one in ALL if one.row]
    assert {one.unit for one in mirrored} == {rows[one.row] for one in mirrored}


@pytest.mark.parametrize("instrument", ALL, ids=lambda one: one.name)
def test_a_name_tells_kind_and_unit_and_its_labels_are_its_own(instrument: Instrument) -> None:
    name = instrument.name
    assert re.fullmatch(r"sluice_[a-z_]+", name)
    assert name.endswith("_total") is (instrument.kind is InstrumentKind.COUNTER)
    suffix = SUFFIX_BY_UNIT.get(instrument.unit, "")
    assert name.removesuffix("_total").endswith(suffix)
    assert not OF_THE_TARGET & set(instrument.labels)
    assert instrument.meaning.endswith(".")
    assert list(instrument.bounds) == sorted(set(instrument.bounds))


def test_a_reading_has_a_row_and_all_of_its_labels() -> None:
    assert reading("sluice_quota_refusals_total", 1, "key").labels == ("key",)
    with pytest.raises(ValueError, match="sluice_quota_refusals_total"):
        reading("sluice_quota_refusals_total", 1)
    with pytest.raises(LookupError, match="sluice_unknown_total"):
        reading("sluice_unknown_total", 1)


def test_the_page_lists_the_metrics_of_prometheus_client() -> None:
    page = (ROOT / "docs" / "prometheus.md").read_text(encoding="utf-8")
    assert [name for name in PROCESS_NAMES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("reader", READERS)
def test_what_dashboards_rules_and_alerts_read_is_exported(reader: str) -> None:
    found = {name for query in queries(READERS[reader]) for name in IN_QUERY.findall(query)}
    assert found
    assert sorted(found - EXPORTED) == []


@pytest.mark.parametrize("reader", READERS)
def test_what_is_read_of_recorded_rules_is_recorded(reader: str) -> None:
    recorded = {rule["record"] for group in rules("rules.yml")["groups"] for rule in group["rules"]}
    found = {name for query in queries(READERS[reader]) for name in RECORDED.findall(query)}
    assert sorted(found - recorded) == []


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    alerts = [rule for group in rules("alerts.yml")["groups"] for rule in group["rules"]]
    tested = (PROFILE / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "deployment" / "observability.md").read_text(encoding="utf-8")
    for alert in alerts:
        name = alert["alert"]
        assert name in tested
        assert f"`{name}`" in guide
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(alert["annotations"]) == {"summary", "action"}


@pytest.mark.parametrize("file", DASHBOARDS)
def test_a_dashboard_has_panels_that_do_not_overlap_and_name_their_source(file: str) -> None:
    board, taken = DASHBOARDS[file], set[tuple[int, int]]()
    (variable,) = board["templating"]["list"]
    assert variable["name"] == "run"
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
            assert panel["targets"]
            assert all("$run" in t["expr"] for t in panel["targets"])
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_dashboards_have_uids_of_their_own_and_healths_is_the_first() -> None:
    uids = {board["uid"] for board in DASHBOARDS.values()}
    assert len(uids) == len(DASHBOARDS) == 4
    overlay = (ROOT / "compose.observability.yaml").read_text(encoding="utf-8")
    assert "/etc/grafana/dashboards/health.json" in overlay
    assert "health.json" in DASHBOARDS
