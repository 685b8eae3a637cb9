"""The values that the chart is rendered with: its own, the examples', the page's, and corners."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.helm_test.documented_commands import documented_values

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
# Sizes that a job took from another cluster's launch: the chart's stand above them.
_JOB_OF_ANOTHER_CLUSTER: Values = {
    "run": {
        "quickstart": False,
        "config": "data: {train_batch_size: 8}\n"
        "actor_rollout_ref:\n"
        "  actor: {ppo_mini_batch_size: 8, use_dynamic_bsz: true}\n"
        "  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 2}\n"
        "trainer: {nnodes: 2, n_gpus_per_node: 8}\n",
    },
    "trainer": {"ranks": 2},
    "devices": {"kind": "gpu"},
}
_EVERYTHING_ON: Values = {
    "fullnameOverride": "dapo",
    "image": {
        "pullSecrets": ["registry"],
        "pullPolicy": "Always",
        "compute": {"tag": 20261122},
        "reward": {"repository": "registry.example/reward", "tag": 0},
    },
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
    corners = {
        "everything-off": _EVERYTHING_OFF,
        "everything-on": _EVERYTHING_ON,
        "job-of-another-cluster": _JOB_OF_ANOTHER_CLUSTER,
    }
    return {"defaults": {}, **examples, **documented_values(), **corners}


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
