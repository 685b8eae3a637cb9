"""The chart's names are those of the project; `make helm-test` checks what the chart renders."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

from sluice.cli.run.certificates import certs
from sluice.launch.network_layout import COMPUTE_IMAGE, REWARD_IMAGE
from sluice.telemetry.metric_names import instrument
from tools.helm_test.value_sets import CHART, ROOT

VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def test_names_are_those_of_the_rest_of_the_project(tmp_path: Path) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (chart["name"], chart["appVersion"]) == (project["name"], project["version"])
    images = VALUES["image"]
    assert images["compute"]["repository"] == COMPUTE_IMAGE
    assert images["reward"]["repository"] == REWARD_IMAGE
    demand = VALUES["rollout"]["autoscaling"]["metric"]["name"]
    assert instrument(demand).name == "sluice_rollout_demand_replicas"
    certs(out=tmp_path / "certs", host=None, days=1, force=False)
    made = {file.name for file in (tmp_path / "certs").iterdir()}
    assert set(VALUES["security"]["files"].values()) <= made
