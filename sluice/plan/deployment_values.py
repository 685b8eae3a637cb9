"""A planned launch as the variables of Compose's files, or as values of the Helm chart."""

from __future__ import annotations

from typing import Literal

import yaml

from sluice.errors import ConfigError
from sluice.plan.launch_plan import PlannedLaunch

Deployment = Literal["compose", "helm"]

_OF_COMPOSE = ("sluice.rollout.replicas",)
_OF_CHART = (
    *_OF_COMPOSE,
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


def deployment_values(found: PlannedLaunch, deployment: Deployment) -> str:
    """Return the lines of a file for ``--env-file``, or of one for ``--values``.

    Raises:
        ConfigError: the launch does not fit, or neither starts such a launch.
    """
    if found.fits_with is None:
        raise ConfigError(
            "the launch does not fit its devices, and no change was found that makes it fit; "
            "leave --values out, which says what it lacks"
        )
    if found.split.nodes > 1:
        raise ConfigError(
            f"the trainer takes {found.split.nodes} machines, and {deployment} starts it on one; "
            'give a split with a smaller trainer (sluice.placement="trainer:N,rollout:M"), or '
            "start the launch on Ray"
        )
    return _variables(found) if deployment == "compose" else _values(found)


def _settings(found: PlannedLaunch, besides: tuple[str, ...]) -> list[str]:
    """Return the overrides of the plan, without keys that the deployment sets."""
    return [
        one
        for one in found.fits_with or found.split.overrides
        if one.partition("=")[0].lstrip("+") not in besides
    ]


def _variables(found: PlannedLaunch) -> str:
    settings = " ".join(_settings(found, _OF_COMPOSE))
    return (
        f"# {found.split.summary}\n"
        f"SLUICE_REPLICAS={found.split.replicas}\n"
        f'SLUICE_SETTINGS="{settings}"\n'
    )


def _values(found: PlannedLaunch) -> str:
    split, rollout = found.split, found.config.actor_rollout_ref.rollout
    if rollout.data_parallel_size > 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.data_parallel_size = {rollout.data_parallel_size}: the "
            "chart's replicas have one engine each; set it to 1, which gives more replicas"
        )
    values: dict[str, object] = {
        "devices": {"kind": "npu" if found.config.trainer.device == "npu" else "gpu"},
        "trainer": {"ranks": split.trainer},
        "rollout": {"replicas": split.replicas, "devicesPerReplica": split.per_replica},
    }
    if settings := _settings(found, _OF_CHART):
        trainer = found.config.trainer  # the chart's own list, which this one replaces
        kept = f"trainer.save_freq={trainer.save_freq} trainer.resume_mode={trainer.resume_mode}"
        values["run"] = {"settings": [*kept.split(), *settings]}
    return f"# {split.summary}\n{yaml.safe_dump(values, sort_keys=False)}"
