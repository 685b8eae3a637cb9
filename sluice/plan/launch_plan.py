"""Plan one launch: split its devices, count both pools, look for a change if they do not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from sluice.concurrency.answers import ask_module
from sluice.config.derived import world_size
from sluice.config.device_split import DeviceSplit, device_split, is_colocated, named_split, splits
from sluice.config.loading.conversions import names_set
from sluice.config.loading.loader import ReadRun, read_run
from sluice.config.memory.devices import DeviceKind, device_kind
from sluice.config.memory.rollout import GIB
from sluice.config.memory.shape import (
    ImageEncoder,
    ModelContent,
    ModelShape,
    image_encoder,
    published_encoder,
    published_model,
    read_model,
    shape_of,
)
from sluice.config.memory.training import guessed_memory, training_layout
from sluice.config.parallel_layout import (
    check_image_layers,
    different_stages,
    stage_layers,
    trainer_layout,
)
from sluice.config.problems import raise_problems
from sluice.config.run import RunConfig, changed
from sluice.errors import ConfigError
from sluice.plan.dry_run import COMMAND, DryRunRequest, PassBytes
from sluice.plan.pools import (
    EnginePool,
    TrainerPool,
    engine_pool,
    extrapolate_layers,
    largest_pool,
    layer_counts,
)
from sluice.plan.search import engine_change, guess, promising_changes, trainer_changes

DEADLINE_S = 300.0
SMALL_BYTES = GIB / 10
"""On a trainer's device."""
_ANY_DEVICE = device_kind("80GB")
"""Its memory and speed are not asked about."""
_MAX_TRIES = 4
_OPTIMISM = 0.9
"""Bytes counted over bytes guessed, before anything was counted with this change."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The trained model.

    Attributes:
        content: of its config.json.
        encoder: encodes images; `None`: it reads none, or the encoder is not counted.
        reads_images: whether it has an encoder.
    """

    name: str
    content: ModelContent
    shape: ModelShape
    encoder: ImageEncoder | None = None
    reads_images: bool = False

    @property
    def encoder_parameters(self) -> int | None:
        """Return the encoder's; `None`: it is not counted."""
        if self.encoder is None:
            return None if self.reads_images else 0
        return self.encoder.parameters


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch on its devices.

    Attributes:
        config: with `split` and `fits_with`.
        fits: as it was written.
        lacks: why not, by pool.
        fits_with: overrides with which it fits; empty if it does as written, `None`: nothing was
            found.
        closest: if nothing was found, the overrides and the peak of the best that was counted.
        seconds: that planning took.
    """

    config: RunConfig
    model: PlannedModel
    device: DeviceKind
    split: DeviceSplit
    trainer: TrainerPool
    engine: EnginePool
    fits: bool
    lacks: Mapping[str, str]
    fits_with: tuple[str, ...] | None
    seconds: float
    closest: tuple[tuple[str, ...], float] | None = None


def planned_model(name: str) -> PlannedModel:
    """Return the model at a folder with a config.json, or of a published name.

    Raises:
        ConfigError: it is neither.
    """
    local = local_model(name)
    if local is not None:
        return local
    content = published_model(name)
    return _make_model(name, content, shape_of(content), published_encoder(name))


def local_model(name: str, config_file: Path | None = None) -> PlannedModel | None:
    """Return the model that `config_file` or the config.json in folder `name` describes, if any.

    Raises:
        ConfigError: a file is there but describes no such model.
    """
    file = config_file or Path(name) / "config.json"
    if config_file is None and not (name and file.is_file()):
        return None
    content, shape = read_model(file)
    vision = content.get("vision_config")
    return _make_model(name, content, shape, vision if isinstance(vision, dict) else {})


def _make_model(
    name: str, content: ModelContent, shape: ModelShape, vision: Mapping[str, object]
) -> PlannedModel:
    return PlannedModel(name, content, shape, image_encoder(vision), bool(vision))


def is_small(config: RunConfig, shape: ModelShape) -> bool:
    """Return whether a trainer takes so little, by a guess, that nobody waits for a count."""
    return guessed_memory(shape, training_layout(config)).peak < SMALL_BYTES


def trainer_as_written(config: RunConfig, model: PlannedModel) -> TrainerPool:
    """Count the trainer of a configuration as it is written. Takes seconds, to load torch.

    Raises:
        ConfigError: sizes do not divide, or the trainer's code does not run here.
    """
    trainer_layout(config, world_size(config))
    return _count_trainer(config, model, _ANY_DEVICE)


def smallest_change(
    file: Path | None,
    overrides: Sequence[str],
    model: PlannedModel,
    device: DeviceKind,
    trainer: TrainerPool,
) -> tuple[str, ...] | None:
    """Return the smallest change with which a trainer fits the devices that its launch names."""
    launch = _Launch(file, tuple(overrides), model, device)
    written = launch.read(())
    plan = _plan_as_written(launch, written.config, named_split(written.config), trainer)
    planned = _search_change(plan, launch, written, is_split=False, holds=lambda _: True)
    return planned.fits_with


def launch_plan(
    file: Path | None, overrides: Sequence[str], model: PlannedModel, device: DeviceKind
) -> PlannedLaunch:
    """Plan a launch.

    Raises:
        ConfigError: keys or values are wrong, or no split of the devices is possible.
    """
    began = time.monotonic()
    launch = _Launch(file, tuple(overrides), model, device)
    written = launch.read(())
    split = launch.split_of(written)
    is_split = is_colocated(written.config, written.keys)
    config = launch.read(split.overrides).config if is_split else written.config
    plan = _plan_as_written(launch, config, split, launch.trainer(config))
    if plan.fits:
        plan = replace(plan, fits_with=())
    else:
        plan = _search_change(
            plan,
            launch,
            written,
            is_split=is_split,
            holds=lambda config: engine_pool(config, model.shape, device).fits(device),
        )
    return replace(plan, seconds=time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What is planned, read with overrides and counted."""

    file: Path | None
    overrides: tuple[str, ...]
    model: PlannedModel
    device: DeviceKind

    def read(self, extra: Sequence[str]) -> ReadRun:
        """Return the launch with more overrides, as a run would read it."""
        run = read_run(self.file, [*self.overrides, *extra])
        raise_problems(run.problems, run.source)
        return run

    def split_of(self, run: ReadRun) -> DeviceSplit:
        """Return the split that the launch says, or the fastest."""
        return device_split(run.config, run.keys, self.model.shape, self.device)

    def trainer(self, config: RunConfig) -> TrainerPool:
        """Return the trainer's pool, from dry runs of a few layers."""
        return _count_trainer(config, self.model, self.device)


def _count_trainer(config: RunConfig, model: PlannedModel, device: DeviceKind) -> TrainerPool:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed, with which the trainer's code counts its "
            "memory; pip install 'sluice[torch]'"
        )
    shape = model.shape
    actor = config.actor_rollout_ref.actor
    cut = actor.megatron.override_transformer_config
    stages = stage_layers(shape.layers, actor.fsdp_config.pipeline_parallel_size, cut)
    if model.encoder is not None:
        check_image_layers(stages, model.encoder.mergers - 1)
    layers = {stage: len(stages[stage]) for stage in different_stages(len(stages))}
    runs = [(stage, n) for stage, count in layers.items() for n in layer_counts(config, count)]
    passes, _ = ask_module(
        COMMAND,
        DryRunRequest(msgspec.to_builtins(config), model.content, world_size(config), runs),
        list[PassBytes],
        task="the dry run of the trainer",
        timeout_s=DEADLINE_S,
        remedy="run it while the machine is idle",
    )
    counted: dict[int, dict[int, PassBytes]] = {stage: {} for stage in layers}
    for (stage, num_counted), pass_bytes in zip(runs, passes, strict=True):
        counted[stage][num_counted] = pass_bytes
    stage_bytes = {stage: extrapolate_layers(counted[stage], n) for stage, n in layers.items()}
    return largest_pool(config, shape, device, stage_bytes, model.encoder)


def _plan_as_written(
    launch: _Launch, config: RunConfig, split: DeviceSplit, trainer: TrainerPool
) -> PlannedLaunch:
    engine = engine_pool(config, launch.model.shape, launch.device)
    lacks = {
        "trainer": trainer.shortfall(launch.device),
        "rollout": engine.shortfall(launch.device),
    }
    return PlannedLaunch(
        config,
        launch.model,
        launch.device,
        split,
        trainer,
        engine,
        fits=not any(lacks.values()),
        lacks={pool: shortfall for pool, shortfall in lacks.items() if shortfall is not None},
        fits_with=None,
        seconds=0.0,
    )


def _search_change(
    plan: PlannedLaunch,
    launch: _Launch,
    written: ReadRun,
    *,
    is_split: bool,
    holds: Callable[[RunConfig], bool],
) -> PlannedLaunch:
    """Return the plan with the smallest change that fits, or as it was; `holds`: an engine fits."""
    model, device = plan.model, plan.device
    engine = engine_change(written.config, model.shape, holds, is_split=is_split)
    if engine is None:
        return plan
    start = changed(written.config, engine.overrides)
    possible = list(splits(start)) if is_split else [plan.split]
    if not possible:
        return plan
    nearest = min(possible, key=lambda candidate: abs(candidate.trainer - plan.split.trainer))
    base = changed(start, nearest.overrides) if is_split else start
    correction = _correction(plan.trainer, plan.config, model.shape)
    if training_layout(start).recomputed_of(model.shape.layers) < model.shape.layers:
        correction = _OPTIMISM  # with recompute other bytes count
    changes = [
        change
        for change in trainer_changes(start, model.shape, nearest, possible)
        if change.overrides or engine.overrides
    ]
    for _ in range(_MAX_TRIES):
        change = next(promising_changes(changes, model.shape, device, base, correction), None)
        if change is None:
            break
        typed = (*engine.overrides, *(nearest.overrides if is_split else ()), *change.overrides)
        overrides = _as_written(typed, written)
        changes = changes[changes.index(change) + 1 :]
        try:  # what is counted is what a run would read
            run = launch.read(overrides)
            trainer = launch.trainer(run.config)
        except ConfigError:  # the next change may be allowed
            continue
        if trainer.shortfall(device) is None and holds(run.config):
            return replace(
                plan,
                config=run.config,
                split=launch.split_of(run),
                trainer=trainer,
                engine=engine_pool(run.config, model.shape, device),
                fits_with=overrides,
                closest=None,
            )
        if plan.closest is None or trainer.peak < plan.closest[1]:
            plan = replace(plan, closest=(overrides, trainer.peak))
        correction = _correction(trainer, run.config, model.shape)
    return plan


def _correction(trainer: TrainerPool, config: RunConfig, shape: ModelShape) -> float:
    guessed = guess(config, shape)
    assert guessed is not None
    return guessed.correction(trainer.peak)


def _as_written(overrides: Sequence[str], written: ReadRun) -> tuple[str, ...]:
    """Return the last override of each key, under the names that the launch gave it."""
    values = dict(text.split("=", 1) for text in overrides)
    return tuple(
        f"{name}={value}"
        for key, value in values.items()
        for name in names_set(key, written.settings)
    )
