"""Plan one launch: split its devices, count both pools, look for a change if they do not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from sluice.config.derived import world_size
from sluice.config.device_split import DeviceSplit, device_split, is_colocated, splits
from sluice.config.loading.loader import KeySettings, ReadRun, read_run
from sluice.config.memory.devices import DeviceKind
from sluice.config.memory.layouts import own_training_layout
from sluice.config.memory.published import encoder_parameters, published_model
from sluice.config.memory.shape import ModelShape, shape_of
from sluice.config.problems import raise_problems
from sluice.config.run import RunConfig
from sluice.doctor.trial import answer_of
from sluice.errors import ConfigError
from sluice.plan.dry_run import COMMAND, DryRunAsked, PassBytes
from sluice.plan.pools import (
    EnginePool,
    TrainerPool,
    engine_pool,
    extrapolated,
    layer_counts,
    trainer_pool,
)
from sluice.plan.search import (
    Change,
    changed,
    engine_change,
    estimate,
    promising,
    trainer_changes,
)

DEADLINE_S = 300.0
_MOST_TRIES = 4
_OPTIMISM = 0.9
"""Bytes counted over bytes estimated, before anything was counted with this change."""
ModelContent = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The trained model.

    Attributes:
        name: as it was given.
        content: of its config.json.
        encoder: parameters of its image encoder.
    """

    name: str
    content: ModelContent
    shape: ModelShape
    encoder: int = 0


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch on its devices.

    Attributes:
        config: with `split` and `fits_with`.
        fits: as it was written.
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
    fits_with: tuple[str, ...] | None
    seconds: float
    closest: tuple[tuple[str, ...], float] | None = None


def planned_model(name: str) -> PlannedModel:
    """Return the model at a folder with a config.json, or of a published name.

    Raises:
        ConfigError: it is neither.
    """
    file = Path(name) / "config.json"
    if not file.is_file():
        content = published_model(name)
        return PlannedModel(name, content, shape_of(content), encoder_parameters(name))
    try:
        whole = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model configuration {file}: {error}; give a config.json") from error
    text = whole.get("text_config")
    content = {**whole, **text} if isinstance(text, dict) else whole
    return PlannedModel(name, content, shape_of(content))


def launch_plan(
    file: Path | None, overrides: Sequence[str], model: PlannedModel, device: DeviceKind
) -> PlannedLaunch:
    """Plan a launch.

    Args:
        file: YAML or overrides; `None`: the defaults.
        overrides: on top of it.
        model: trained.
        device: each of the launch's devices.

    Raises:
        ConfigError: keys or values are wrong, or there are too few devices.
    """
    began = time.monotonic()
    written = _read(file, overrides)
    reread = _rereader(file, overrides)
    counted = _Counted(model)
    settings = KeySettings(written.config, written.settings.by_key())

    def holds(config: RunConfig) -> bool:
        return engine_pool(config, model.shape, device).fits(device)

    split = device_split(written.config, settings, model.shape, device)
    config = reread(split.overrides)
    plan = PlannedLaunch(
        config,
        model,
        device,
        split,
        counted.trainer(config, device),
        engine_pool(config, model.shape, device),
        fits=False,
        fits_with=None,
        seconds=0.0,
    )
    if plan.trainer.peak <= device.usable_bytes and plan.engine.fits(device):
        plan = replace(plan, fits=True, fits_with=())
    elif (engine := engine_change(written.config, holds)) is not None:
        plan = _searched(
            plan, engine, counted, reread, is_split=is_colocated(written.config, settings)
        )
    return replace(plan, seconds=time.monotonic() - began)


class _Counted:
    """Trainer pools by dry run."""

    def __init__(self, model: PlannedModel) -> None:
        self._model = model

    def trainer(self, config: RunConfig, device: DeviceKind) -> TrainerPool:
        """Return the trainer's pool, from a dry run of a few layers."""
        shape = self._model.shape
        counts = layer_counts(shape.layers)
        found, _ = answer_of(
            COMMAND,
            DryRunAsked(
                msgspec.to_builtins(config), self._model.content, world_size(config), counts
            ),
            list[PassBytes],
            what="the dry run of the trainer",
            timeout_s=DEADLINE_S,
            remedy="run it while the machine is idle",
        )
        whole = found[0]
        if len(found) > 1:
            whole = extrapolated(found[0], found[1], counts[1] - counts[0], shape.layers, counts[0])
        return trainer_pool(config, shape, device, whole, self._model.encoder)


def _searched(
    plan: PlannedLaunch,
    engine: Change,
    counted: _Counted,
    reread: Callable[[Sequence[str]], RunConfig],
    *,
    is_split: bool,
) -> PlannedLaunch:
    """Return the plan with the smallest change that fits, or as it was."""
    model, device = plan.model, plan.device
    start = changed(reread(()), engine.overrides)
    possible = list(splits(start)) if is_split else [plan.split]
    own = min(possible, key=lambda one: abs(one.trainer - plan.split.trainer), default=plan.split)
    base = changed(start, own.overrides)

    correction, tries = _correction(plan.trainer, plan.config, model.shape), 0
    if not own_training_layout(start).gradient_checkpointing:
        correction = _OPTIMISM  # with recompute other bytes count
    changes = [
        one
        for one in trainer_changes(start, model.shape, own, possible)
        if one.overrides or engine.overrides
    ]
    while tries < _MOST_TRIES:
        found = next(promising(changes, model.shape, device, base, correction), None)
        if found is None:
            break
        change, config = found
        trainer = counted.trainer(config, device)
        tries += 1
        split = next((one for one in possible if one.trainer == trainer.layout.ranks), own)
        needed = _needed((*engine.overrides, *change.overrides), split, plan.split)
        if plan.closest is None or trainer.peak < plan.closest[1]:
            plan = replace(plan, closest=(needed, trainer.peak))
        if trainer.peak <= device.usable_bytes:
            pool = engine_pool(config, model.shape, device)
            return replace(
                plan,
                config=config,
                split=split,
                trainer=trainer,
                engine=pool,
                fits_with=needed,
                closest=None,
            )
        correction = _correction(trainer, config, model.shape)
        changes = changes[changes.index(change) + 1 :]
    return plan


def _correction(trainer: TrainerPool, config: RunConfig, shape: ModelShape) -> float:
    found = estimate(config, shape)
    assert found is not None
    return found.correction(trainer.peak)


def _needed(overrides: Sequence[str], split: DeviceSplit, before: DeviceSplit) -> tuple[str, ...]:
    """Return the overrides of a change, with another split as a placement."""
    kept = [text for text in overrides if text not in split.overrides]
    if split != before:
        kept.append(f'sluice.placement="{split.placement}"')
    return tuple(kept)


def _read(file: Path | None, overrides: Sequence[str]) -> ReadRun:
    run = read_run(file, list(overrides))
    raise_problems(run.problems, run.source)
    return run


def _rereader(file: Path | None, overrides: Sequence[str]) -> Callable[[Sequence[str]], RunConfig]:
    def reread(more: Sequence[str]) -> RunConfig:
        return _read(file, [*overrides, *more]).config

    return reread
