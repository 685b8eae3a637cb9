"""The values that the chart is rendered with: its defaults, the examples, and corners of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]
CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "sluice"
EXAMPLES = CHART.parent / "examples"

_EVERYTHING_OFF: Values = {
    "networkPolicy": {"enabled": False},
    "endOfRun": {"scaleDown": False},
    "trainer": {"shmSize": "64Mi", "backoffLimit": 0},
    "reward": {"ledger": {"ownVolume": False}, "podDisruptionBudget": {"enabled": False}},
    "rollout": {"podDisruptionBudget": {"enabled": False}, "replicas": 0},
}
_EVERYTHING_ON: Values = {
    "fullnameOverride": "dapo",
    "image": {"pullSecrets": ["registry"], "pullPolicy": "Always"},
    "run": {
        "name": "second",
        "files": {"note.txt": "  <kept> {{ x }}\n\n 'as': is\n\n"},
        "settings": [],
    },
    "storage": {
        "runs": {"storageClassName": "fast", "accessModes": ["ReadWriteOnce"], "keep": False},
        "jobs": {"existingClaim": "jobs"},
    },
    "security": {"enabled": True, "secretName": "certs"},
    "metrics": {
        "enabled": True,
        "podMonitor": {"enabled": True, "runLabel": "math-7"},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True, "labels": {"dashboards": "here"}},
    },
    "networkPolicy": {
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 4317}]}]
    },
    "shutdownGraceSeconds": 60,
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "trainer": {
        "ranks": 4,
        "podDisruptionBudget": {"enabled": True},
        "podLabels": {"team": "post-training"},
        "podAnnotations": {"note": "x"},
        "priorityClassName": "training",
    },
    "reward": {"ledger": {"storageClassName": "block"}, "readOnlyRootFilesystem": False},
    "rollout": {
        "drainSeconds": 45,
        "autoscaling": {"enabled": True, "minReplicas": 2},
        "maxUnavailable": "25%",
        "runtimeClassName": "nvidia",
    },
}


def value_sets() -> dict[str, Values]:
    """All sets by name."""
    examples = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in sorted(EXAMPLES.glob("*.yaml"))
    }
    corners = {"everything-off": _EVERYTHING_OFF, "everything-on": _EVERYTHING_ON}
    return {"defaults": {}, **examples, **corners}


def merged(values: Mapping[str, Any]) -> Values:
    """The chart's own values with others above them, as Helm merges them."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return _above(defaults, values)


def _above(lower: Values, upper: Mapping[str, Any]) -> Values:
    both = dict(lower)
    for key, value in upper.items():
        below = both.get(key)
        nests = isinstance(value, Mapping) and isinstance(below, dict)
        both[key] = _above(below, value) if nests and isinstance(below, dict) else value
    return both
