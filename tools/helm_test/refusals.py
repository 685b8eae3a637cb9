"""Values that Helm has to refuse, and the field that its message has to name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.helm_test.chart import refusal

_REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rollout/replicas", {"rollout": {"replicas": "two"}}),
    ("rollout/replicas", {"rollout": {"replicas": -1}}),
    ("replica", {"rollout": {"replica": 2}}),
    ("rollout/maxUnavailable", {"rollout": {"maxUnavailable": 0}}),
    ("rollout/maxUnavailable", {"rollout": {"maxUnavailable": "0%"}}),
    ("rollout/maxUnavailable", {"rollout": {"maxUnavailable": "00%"}}),
    ("trainer/backoffLimit", {"trainer": {"backoffLimit": -1}}),
    ("replicas", {"replicas": 2}),
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
    ("shutdownGraceSeconds", {"shutdownGraceSeconds": "long"}),
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
    ("metrics.prometheusRule.enabled", {"metrics": {"prometheusRule": {"enabled": True}}}),
    ("metrics.dashboards.enabled", {"metrics": {"dashboards": {"enabled": True}}}),
)


def refusal_problems() -> Iterator[str]:
    """Values that are taken, or refused without the field's name."""
    for field, values in _REFUSED:
        said = refusal(values)
        if said is None:
            yield f"{values}: taken"
        elif field not in said:
            yield f"{values}: refused without the name {field}: {said}"


def count() -> int:
    """How many are tried."""
    return len(_REFUSED)
