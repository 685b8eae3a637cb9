"""The chart's names are those of the project; `make helm-test` checks what the chart renders."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from sluice.cli.run.certificates import certs
from sluice.config.loading.loader import load_config
from sluice.launch.network_layout import COMPUTE_IMAGE, REWARD_IMAGE
from sluice.telemetry.metric_names import instrument
from tests.support.source_tree import ROOT

CHART = ROOT / "deploy" / "helm" / "sluice"
GOLDENS = sorted((CHART.parent / "golden").iterdir())
_SETTING = re.compile(r"^[+ ]?\s*- ([a-z_]+(?:\.\w+)+=\S+)$", re.MULTILINE)
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


def test_sluice_accepts_the_settings_of_the_rendered_objects() -> None:
    """A golden of another set of values than the defaults is a diff; its context counts too."""
    texts = {golden.name: golden.read_text(encoding="utf-8") for golden in GOLDENS}
    settings = {name: _SETTING.findall(text) for name, text in texts.items()}
    assert "trainer.device=npu" in settings["npu.diff"]
    for overrides in settings.values():
        load_config(None, overrides)
