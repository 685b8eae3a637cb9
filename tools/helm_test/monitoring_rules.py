"""What watches a run: series with the labels that alerts go by, rules and dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from sluice.launch.network_layout import KINDS
from tools.helm_test.chart import NAMESPACE
from tools.helm_test.documents import Document, Pod, Rendered

_OBSERVABILITY = Path(__file__).resolve().parents[2] / "deploy" / "observability"
_POD_LABEL = "__meta_kubernetes_pod_label_"
_JOBS = re.compile(r'job(=~?)"([^"]+)"')


def series_carry_the_labels_that_alerts_go_by(rendered: Rendered) -> Iterator[str]:
    """`job` is the alerts' one, `run` the run's own, `service` the kind of the pod's service."""
    monitors = rendered.of_kind("PodMonitor")
    if bool(monitors) != rendered.values["metrics"]["podMonitor"]["enabled"]:
        yield f"{len(monitors)} PodMonitors"
    given = rendered.values["metrics"]["podMonitor"]["runLabel"]
    run = given or f"{NAMESPACE}/{rendered.release}/{rendered.values['run']['name']}"
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        selected = rendered.selected(monitor["spec"]["selector"]["matchLabels"])
        if not selected >= set(KINDS):
            yield f"scrapes {sorted(selected)}"
        for pod in rendered.services():
            if endpoint["port"] not in [port.get("name") for port in pod.container["ports"]]:
                yield f"{pod.component}: no port {endpoint['port']}"
            labels = _labels(endpoint, pod)
            if not _is_watched(labels.get("job", "")):
                yield f"{pod.component}: job {labels.get('job')}, which no alert means"
            if (labels.get("run"), labels.get("service")) != (run, pod.component):
                yield f"{pod.component}: labels {labels}"


def _labels(endpoint: Document, pod: Pod) -> dict[str, str]:
    """What Prometheus makes of a target by the rules of relabeling, in the operator's spelling."""
    known = {_POD_LABEL + re.sub(r"\W", "_", name): text for name, text in pod.labels.items()}
    made = {"job": f"{NAMESPACE}/monitor"}
    for rule in endpoint.get("relabelings", []):
        assert not set(rule) - {"sourceLabels", "targetLabel", "replacement"}, "only replacements"
        source = ";".join(known.get(name, "") for name in rule.get("sourceLabels", []))
        made[rule["targetLabel"]] = rule.get("replacement", source)
    return made


def _is_watched(job: str) -> bool:
    """Whether every selector of alerts takes the job; `=` and anchored `=~`, as Prometheus has."""
    text = (_OBSERVABILITY / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    selectors = _JOBS.findall(text)
    assert selectors, "alerts select by job"
    return all(re.fullmatch(at if op == "=~" else re.escape(at), job) for op, at in selectors)


def rules_and_alerts_are_the_profiles(rendered: Rendered) -> Iterator[str]:
    """The PrometheusRule has each group of deploy/observability once, and nothing else."""
    found = rendered.of_kind("PrometheusRule")
    if not rendered.values["metrics"]["prometheusRule"]["enabled"]:
        yield from (f"PrometheusRule {rule['metadata']['name']} unasked" for rule in found)
        return
    wanted: dict[str, object] = {}
    for name in ("rules.yml", "alerts.yml"):
        file = _OBSERVABILITY / "prometheus" / name
        groups = yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        wanted |= {group["name"]: group for group in groups}
    groups = [group for rule in found for group in rule["spec"]["groups"]]
    if {group["name"]: group for group in groups} != wanted or len(groups) != len(wanted):
        yield f"PrometheusRule: groups {[group['name'] for group in groups]} are not the profile's"
    labels = rendered.values["metrics"]["prometheusRule"]["labels"]
    yield from _unlabelled(found, labels)


def dashboards_are_the_profiles(rendered: Rendered) -> Iterator[str]:
    """Each dashboard of deploy/observability lies in a ConfigMap that Grafana's sidecar finds."""
    values = rendered.values["metrics"]["dashboards"]
    maps = [each for each in rendered.of_kind("ConfigMap") if _is_dashboard(each)]
    wanted = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in sorted((_OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))
    ]
    found = [json.loads(text) for each in maps for text in each["data"].values()]
    if sorted(one["uid"] for one in found) != sorted(
        one["uid"] for one in wanted if values["enabled"]
    ):
        yield f"dashboards: {[one['title'] for one in found]}"
    yield from (f"dashboard {one['title']}: changed" for one in found if one not in wanted)
    yield from _unlabelled(maps, values["labels"])


def _is_dashboard(config_map: Document) -> bool:
    return "-dashboard-" in config_map["metadata"]["name"]


def _unlabelled(documents: list[Document], labels: Mapping[str, str]) -> Iterator[str]:
    for each in documents:
        if not labels.items() <= each["metadata"]["labels"].items():
            yield f"{each['kind']} {each['metadata']['name']}: labels without {labels}"


MONITORING_RULES = (
    series_carry_the_labels_that_alerts_go_by,
    rules_and_alerts_are_the_profiles,
    dashboards_are_the_profiles,
)
