"""The values that the chart is rendered with: its own, the examples', and corners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "sluice"
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
# Values that Helm must refuse, and the field that its message must name.
REFUSED: tuple[tuple[str, Values], ...] = (
    ("rollout/replicas", {"rollout": {"replicas": "two"}}),
    ("replica", {"rollout": {"replica": 2}}),
    ("rollout/maxUnavailable", {"rollout": {"maxUnavailable": 0}}),
    ("trainer/backoffLimit", {"trainer": {"backoffLimit": -1}}),
    ("devices/kind", {"devices": {"kind": "tpu"}}),
    ("gpus", {"trainer": {"gpus": 2}}),
    ("trainer/ranks", {"trainer": {"ranks": 0}}),
    (
        "trainer/resources/requests/memory",
        {"trainer": {"resources": {"requests": {"memory": "4GB"}}}},
    ),
    ("storage/runs/accessModes/0", {"storage": {"runs": {"accessModes": ["ReadOnlyMany"]}}}),
    ("storage/runs/size", {"storage": {"runs": {"size": "much"}}}),
    ("run/name", {"run": {"name": "../other"}}),
    ("run/settings/0", {"run": {"settings": ["--restart"]}}),
    ("security/files/key", {"security": {"files": {"key": "../key"}}}),
    ("networkPolicy/transferPorts/first", {"networkPolicy": {"transferPorts": {"first": 0}}}),
    ("metrics/podMonitor/interval", {"metrics": {"podMonitor": {"interval": "often"}}}),
    ("fullnameOverride", {"fullnameOverride": "Sluice"}),
    ("image/pullPolicy", {"image": {"pullPolicy": "Sometimes"}}),
    ("shmSize", {"reward": {"shmSize": "1Gi"}}),
    ("extraEnv/0", {"extraEnv": [{"name": "A", "secret": "x"}]}),
    # What the schema cannot see.
    ("security.secretName", {"security": {"enabled": True}}),
    ("run.quickstart", {"run": {"config": "trainer: {}"}}),
    ("run.configFile", {"run": {"quickstart": False, "config": "a", "configFile": "/jobs/a"}}),
    ("run.files", {"run": {"files": {"run.yaml": "x"}}}),
    ("sluice.trainer.endpoint.port", {"run": {"settings": ["sluice.trainer.endpoint.port=1"]}}),
    ("sluice.run_dir", {"run": {"settings": ["++sluice.run_dir=/tmp"]}}),
    ("trainer.n_gpus_per_node", {"run": {"settings": ["trainer.n_gpus_per_node=8"]}}),
    ("rollout.drainSeconds", {"rollout": {"drainSeconds": 40}}),
    (
        "rollout.autoscaling.minReplicas",
        {"rollout": {"autoscaling": {"minReplicas": 5, "maxReplicas": 4}}},
    ),
    (
        "networkPolicy.transferPorts.first",
        {"networkPolicy": {"transferPorts": {"first": 60000, "last": 50000}}},
    ),
    ("image/compute/tag", {"image": {"compute": {"tag": 1.5}}}),
    ("metrics.enabled", {"rollout": {"autoscaling": {"enabled": True}}}),
    (
        "tensor_model_parallel_size",
        {"run": {"settings": ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]}},
    ),
    ("metrics.podMonitor.enabled", {"metrics": {"podMonitor": {"enabled": True}}}),
)


def value_sets() -> dict[str, Values]:
    """Return all sets by name."""
    examples = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8"))
        for file in sorted(EXAMPLES.glob("*.yaml"))
    }
    corners = {
        "everything-off": _EVERYTHING_OFF,
        "everything-on": _EVERYTHING_ON,
        "job-of-another-cluster": _JOB_OF_ANOTHER_CLUSTER,
    }
    return {"defaults": {}, **examples, **corners}
