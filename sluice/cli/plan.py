"""`sluice plan`: check whether a launch fits its devices, and if not, show what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import typer
import yaml
from rich.console import Console

from sluice.cli.arguments import AsJson, ConfigArguments, TrustScript, split_arguments
from sluice.cli.terminal import output_console, print_json, print_line, print_table
from sluice.config.loading.loader import read_run
from sluice.config.memory.devices import device_kind
from sluice.config.memory.rollout import GIB, in_gib
from sluice.errors import ConfigError
from sluice.plan.launch_plan import PlannedLaunch, launch_plan, planned_model

Deployment = Literal["compose", "helm"]
_OF_COMPOSE = ("sluice.rollout.replicas",)
_OF_CHART = (
    *_OF_COMPOSE,
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


def plan(
    arguments: ConfigArguments = None,
    *,
    device: Annotated[str, typer.Option(help="Memory of one device, such as 24GB, 64GB, 80GB.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with a config.json, or the name of a published Qwen model. Default: "
            "actor_rollout_ref.model.path."
        ),
    ] = None,
    values: Annotated[
        Deployment | None,
        typer.Option(help="Print the split for an --env-file of Compose, or as values of Helm."),
    ] = None,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Divide a launch's devices into trainer and rollouts, and count by phase what each holds.

    The trainer's own code runs for one rank, without memory, devices or weights. If the launch does
    not fit, the smallest change that does is printed as overrides: of layout, recompute, offload,
    dtypes and split only. The exit code is 1 if it does not fit as written; after an error it is 1
    too, and no plan is printed.

    \b
    Examples:
      sluice plan run.yaml --device 80GB
      sluice plan launch.overrides --device 64GB --model Qwen3-32B
      sluice plan run.yaml --device 80GB --values compose > gpus.env
    """
    file, overrides = split_arguments(arguments, trust_script=trust_script)
    name = model or read_run(file, overrides).config.actor_rollout_ref.model.path
    if not name:
        raise ConfigError(
            "actor_rollout_ref.model.path is not set, so no model is known; give --model"
        )
    planned = launch_plan(file, overrides, planned_model(name), device_kind(device))
    if values is not None:  # of a launch that fits with them
        typer.echo(deployment_values(planned, values), nl=False)
        return
    if as_json:
        print_json(plan_as_json(planned))
    else:
        print_plan(output_console(), planned)
    if not planned.fits:
        raise typer.Exit(1)


def plan_as_json(planned: PlannedLaunch) -> dict[str, object]:
    """Return the plan for programs; bytes are bytes."""
    trainer, engine = planned.trainer, planned.engine
    return {
        "fits": planned.fits,
        "lacks": dict(planned.lacks),
        "fits_with": None if planned.fits_with is None else list(planned.fits_with),
        "closest": None if planned.closest is None else list(planned.closest[0]),
        "split": {
            "trainer": planned.split.trainer,
            "rollout": planned.split.rollout,
            "replicas": planned.split.replicas,
            "overrides": list(planned.split.overrides),
        },
        "peaks": {"trainer": dict(trainer.phases), "rollout": dict(engine.phases)},
        "stages": {f"{number + 1}": peak for number, peak in trainer.stages.items()},
        "engine": {
            "tensor_parallel": engine.tp,
            "holds_weights": engine.holds_weights,
            "longest_rows": engine.longest_rows,
        },
        "encoder_parameters": planned.model.encoder_parameters,
        "host": {"trainer": trainer.host, "rollout": engine.host},
        "layout": {
            "ranks": trainer.layout.ranks,
            "shard": trainer.layout.shard,
            "sequence": trainer.layout.sequence,
            "experts": trainer.layout.experts,
            "tensor": trainer.layout.tensor,
            "pipeline": trainer.layout.pipeline,
        },
        "collectives": dict(trainer.moved),
        "step_floor_s": trainer.floor_s,
        "device_bytes": planned.device.size,
        "usable_bytes": planned.device.usable_bytes,
        "seconds": round(planned.seconds, 1),
    }


def print_plan(console: Console, planned: PlannedLaunch) -> None:
    """Print split, pools and verdict."""
    trainer, engine, split, device = planned.trainer, planned.engine, planned.split, planned.device
    print_line(
        console,
        f"{planned.model.name}: {split.trainer} device(s) train, {split.rollout} generate "
        f"({split.replicas} replica(s) of {split.per_replica}), {device.gib:g} GiB each; "
        f"a plan fills {device.usable_bytes / GIB:.1f}",
    )
    if planned.model.encoder_parameters is None:
        print_line(console, "the model's image encoder is not counted")
    print_line(console, f"as keys: {' '.join(split.overrides)}")
    layout = trainer.layout
    stages = f" in {layout.pipeline} stages" if layout.pipeline > 1 else ""
    print_line(
        console,
        f"trainer: {layout.ranks} ranks{stages}, {layout.copy} share a copy, "
        f"{layout.sequence} share a sequence, {layout.experts} divide the experts, "
        f"{layout.tensor} cut each layer\n",
    )
    suffix = f" of {trainer.stage_name}" if trainer.stage_name else ""
    _print_phases(console, f"GiB on a trainer's device{suffix}, peak by phase", trainer.phases)
    if trainer.stage_name:
        peaks = ", ".join(
            f"{number + 1}: {in_gib(peak)}" for number, peak in trainer.stages.items()
        )
        print_line(console, f"peaks of stages, GiB: {peaks}")
    _print_phases(console, f"GiB on an engine's device, TP {engine.tp}", engine.phases)
    kinds = ", ".join(f"{kind} {in_gib(size)}" for kind, size in trainer.moved.items() if size)
    print_line(
        console,
        f"host, GiB: {in_gib(trainer.host)} for a trainer's machine, {in_gib(engine.host)} for a "
        "replica during an update; not compared with a machine's memory",
    )
    print_line(console, f"collectives of a micro-batch, GiB: {kinds or 'none'}")
    print_line(
        console,
        f"a step trains at least {trainer.floor_s:.0f} s (computing {trainer.compute_s:.0f} s, "
        f"moving {trainer.moving_s:.0f} s, {device.name} at full rate)\n",
    )
    print_line(console, _verdict(planned))


def _print_phases(console: Console, title: str, phases: Mapping[str, float]) -> None:
    rows = [(name, in_gib(size)) for name, size in phases.items()]
    print_table(console, title, ("phase", "GiB"), rows, right=("GiB",))


def _verdict(planned: PlannedLaunch) -> str:
    if planned.fits:
        return "It fits."
    names = {"trainer": "a trainer's device", "rollout": "an engine's device"}
    why = "; ".join(f"{names[pool]}: {shortfall}" for pool, shortfall in planned.lacks.items())
    text = f"It does not fit as written ({why})"
    if planned.fits_with is None:
        text += (
            ", and no change of layout, recompute, offload, dtypes or split was found that makes "
            "it fit; use more or larger devices, or a smaller micro-batch."
        )
        if planned.closest is not None:
            overrides, peak = planned.closest
            text += f" The closest takes {in_gib(peak)} GiB: {' '.join(overrides)}"
        return text
    text += f"; it fits (as above) with: {' '.join(planned.fits_with)}"
    if any(override.endswith("model_dtype=bfloat16") for override in planned.fits_with):
        text += "\nSmall updates vanish in bfloat16 weights; more devices avoid that."
    return text


def deployment_values(planned: PlannedLaunch, deployment: Deployment) -> str:
    """Return the lines of a file for ``--env-file`` or ``--values``.

    Raises:
        ConfigError: the launch does not fit, or neither starts such a launch.
    """
    if planned.fits_with is None:
        raise ConfigError(
            "the launch does not fit its devices, and no change was found that makes it fit; "
            "leave --values out, which says what it lacks"
        )
    if planned.split.nodes > 1:
        raise ConfigError(
            f"the trainer takes {planned.split.nodes} machines, and {deployment} starts it on one; "
            'give a split with a smaller trainer (sluice.placement="trainer:N,rollout:M"), or '
            "start the launch on Ray"
        )
    return _compose_variables(planned) if deployment == "compose" else _helm_values(planned)


def _plan_overrides(planned: PlannedLaunch, besides: tuple[str, ...]) -> list[str]:
    """Return the overrides of the plan, without keys that the deployment sets."""
    return [
        override
        for override in planned.fits_with or planned.split.overrides
        if override.partition("=")[0].lstrip("+") not in besides
    ]


def _compose_variables(planned: PlannedLaunch) -> str:
    settings = " ".join(_plan_overrides(planned, _OF_COMPOSE))
    return (
        f"# {planned.split.summary}\n"
        f"SLUICE_REPLICAS={planned.split.replicas}\n"
        f'SLUICE_SETTINGS="{settings}"\n'
    )


def _helm_values(planned: PlannedLaunch) -> str:
    split, rollout = planned.split, planned.config.actor_rollout_ref.rollout
    if rollout.data_parallel_size > 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.data_parallel_size = {rollout.data_parallel_size}: the "
            "chart's replicas have one engine each; set it to 1, which gives more replicas"
        )
    values: dict[str, object] = {
        "devices": {"kind": "npu" if planned.config.trainer.device == "npu" else "gpu"},
        "trainer": {"ranks": split.trainer},
        "rollout": {"replicas": split.replicas, "devicesPerReplica": split.per_replica},
    }
    if settings := _plan_overrides(planned, _OF_CHART):
        trainer = planned.config.trainer  # the chart's own list, which this one replaces
        chart_settings = (
            f"trainer.save_freq={trainer.save_freq} trainer.resume_mode={trainer.resume_mode}"
        )
        values["run"] = {"settings": [*chart_settings.split(), *settings]}
    return f"# {split.summary}\n{yaml.safe_dump(values, sort_keys=False)}"
