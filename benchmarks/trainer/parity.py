"""Gradients and losses of real gloo ranks in every layout, against one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import print_line
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.loss import LOSSES
from tests.support.rank_parity import Subject, compare, made_subject
from tests.support.rank_peer import NUM_GROUPS
from tests.support.tiny_policy import (
    adapting,
    make_batch,
    make_config,
    recomputing,
    with_critic,
)
from tests.support.trainer_ranks import end, trainer

_STEPS = (1, 2, 3)
_ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0}
_OFFLOAD = {"param_offload": True, "optimizer_offload": True}
_ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_mini_batch_size": 2,
    "entropy_coeff": 0.01,
}
_DENSE, _MOE = ("qwen3", "qwen2", "llama"), ("qwen3_moe",)
# Adapters, recompute: families and layouts take turns.
_VARIANTS = tuple(product((False, True), (False, True)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that layouts divide: its layers, and its heads for keys."""

    layers: int
    kv_heads: int

    @property
    def changes(self) -> dict[str, int]:
        """Return the keys of its config.json."""
        return {"num_hidden_layers": self.layers, "num_key_value_heads": self.kv_heads}


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a layout; `copy` ranks of each tensor index and stage hold the stage once.

    Its run trains a `critic` too, or has none.
    """

    ranks: int
    copy: int
    sequence: int = 1
    experts: int = 1
    tensor: int = 1
    stages: int = 1
    critic: bool = False

    @property
    def keys(self) -> dict[str, int]:
        """Return FSDP's keys."""
        return {
            "fsdp_size": self.copy,
            "ulysses_sequence_parallel_size": self.sequence,
            "expert_parallel_size": self.experts,
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.stages,
        }

    @property
    def name(self) -> str:
        """Return the layout in words."""
        copies = self.ranks // (self.copy * self.tensor * self.stages)
        sizes = {
            "stages": self.stages,
            "sequence": self.sequence,
            "tensor": self.tensor,
            "experts": self.experts,
        }
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if self.copy > 1:
            parts.insert(0, f"HSDP, {copies} copies" if copies > 1 else "FSDP2")
        elif copies > 1:
            parts.insert(0, f"{copies} copies")
        return " × ".join(parts)

    @property
    def shape(self) -> Shape:
        """Return what the models' sizes have to be."""
        return Shape(2 if self.stages == 1 else 4, max(2, self.tensor))

    @property
    def families(self) -> tuple[str, ...]:
        """Return the models that are tried; where experts are divided, only those that have any."""
        return _MOE if self.experts > 1 else _DENSE + _MOE


# Append new ones: adapters, offload and models of runs take turns by place.
LAYOUTS = (
    Layout(4, 4),
    Layout(4, 2),
    Layout(4, 4, sequence=2, critic=True),
    Layout(4, 2, sequence=2),
    Layout(4, 4, sequence=4),
    Layout(4, 4, experts=4),
    Layout(4, 2, experts=2, critic=True),
    Layout(4, 4, sequence=2, experts=4),
    Layout(4, 4, sequence=4, experts=2),
    Layout(4, 2, tensor=2),
    Layout(4, 1, tensor=2, critic=True),
    Layout(4, 2, sequence=2, tensor=2),
    Layout(4, 2, tensor=2, experts=4),
    Layout(4, 2, sequence=2, tensor=2, experts=2),
    Layout(4, 1, stages=4, critic=True),
    Layout(4, 2, stages=2),
    Layout(4, 1, stages=2, critic=True),
    Layout(4, 2, sequence=2, stages=2),
    Layout(4, 1, tensor=2, stages=2, critic=True),
    Layout(4, 2, experts=2, stages=2, critic=True),
    Layout(4, 2, sequence=2, experts=2, stages=2),
    Layout(4, 1, tensor=2, experts=2, stages=2),
    Layout(8, 8, critic=True),
    Layout(8, 4, sequence=2),
    Layout(8, 8, sequence=4, experts=4),
    Layout(8, 4, sequence=2, experts=2),
    Layout(8, 4, sequence=2, tensor=2, critic=True),
    Layout(8, 2, sequence=2, tensor=2),
    Layout(8, 4, sequence=2, tensor=2, experts=8),
    Layout(8, 4, stages=2),
    Layout(8, 2, stages=4, critic=True),
    Layout(8, 2, sequence=2, stages=2),
    Layout(8, 2, tensor=2, stages=2),
    Layout(8, 2, sequence=2, tensor=2, stages=2),
    Layout(8, 1, tensor=2, stages=4, critic=True),
    Layout(8, 4, sequence=2, experts=4, stages=2),
    Layout(8, 2, tensor=2, experts=4, stages=2),
    Layout(8, 2, sequence=2, tensor=2, experts=2, stages=2),
    Layout(8, 2, tensor=4, critic=True),
    Layout(8, 1, tensor=4, stages=2),
    Layout(8, 2, tensor=2, experts=2, stages=2),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a layout: the worst gradient error, and that of the losses of a run.

    ``equal`` is whether passes without gradients gave the logprobs of those with.
    """

    cases: int
    gradient: float
    equal: bool
    loss: float


def parity() -> dict[str, Any]:
    """Return the figures; print a row for each layout, which docs/parallelism.md groups."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = _TinyModels(Path(folder))
        rows = [_row(number, layout, tiny) for number, layout in enumerate(LAYOUTS)]
    return {
        "parity_worst": _worst(row.gradient for row in rows),
        "parity_cases": sum(row.cases for row in rows),
        "parity_layouts": len(rows),
        "forward_equal": all(row.equal for row in rows),
        "loss_worst": _worst(row.loss for row in rows),
    }


def _worst(errors: Iterable[float]) -> float:
    """Return the largest; nan if one is, which `max` may pass over."""
    return float(np.max(list(errors)))


def _row(number: int, layout: Layout, tiny: _TinyModels) -> Row:
    # Where only one family is tried, it is tried twice.
    families = layout.families if len(layout.families) > 1 else layout.families * 2
    passes = []
    for place, family in enumerate(families):
        adapts, recomputes = _VARIANTS[(number + place) % len(_VARIANTS)]
        passes.append((tiny.subject(family, layout.shape, adapts=adapts), recomputes))
    scratch = tiny.scratch / f"layout-{number}"
    scratch.mkdir()
    found = compare(layout.ranks, layout.keys, passes, scratch)
    equal = all(rank.is_equal for one in found for rank in one.ranks)
    run = _Run(
        layout.families[number % len(layout.families)],
        layout.shape,
        adapts=number // 4 % 2 == 1,
        offloads=number % 3 == 0,
        critic=layout.critic,
    )
    loss = tiny.difference(layout, run)
    worst = _worst(one.error for one in found)
    print_line(
        f"| {layout.ranks} | {layout.name} | {', '.join(layout.families)} | {len(found)} "
        f"| {worst:.1e} | {'equal' if equal else 'differ'} | {run.name} | {loss:.1e} |"
    )
    return Row(len(found), worst, equal, loss)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of DAPO; with a critic one of PPO."""

    family: str
    shape: Shape
    adapts: bool
    offloads: bool
    critic: bool

    @property
    def name(self) -> str:
        """Return it in words."""
        parts = {"critic": self.critic, "adapters": self.adapts, "offload": self.offloads}
        return ", ".join([self.family, *(name for name, is_there in parts.items() if is_there)])


@dataclass(frozen=True)
class _TinyModels:
    """Models, their gradients, and three steps of runs on one rank; each is made once."""

    scratch: Path
    _metrics: dict[_Run, list[dict[str, float]]] = field(default_factory=dict)

    def subject(self, family: str, shape: Shape, *, adapts: bool) -> Subject:
        """Return a model, or an adapter of it, with the gradients by transformers."""
        return made_subject(family, adapts=adapts, **shape.changes)

    def difference(self, layout: Layout, run: _Run) -> float:
        """Return the largest difference of a loss; with layers recomputed on four ranks."""
        keys = {"dtype": "float32", **layout.keys, **(_OFFLOAD if run.offloads else {})}
        with trainer(
            self.subject(run.family, run.shape, adapts=False).folder,
            layout.ranks,
            critic=run.critic,
            recomputes=layout.ranks == 4,
            adapters=_ADAPTERS if run.adapts else None,
            **_ACTOR | {"fsdp_config": keys},
        ) as ranks:
            found = [ranks[0].command(f"train {step}") for step in _STEPS]
            end(ranks)
        return _worst(
            abs(ours[name] - theirs[name])
            for ours, theirs in zip(found, self._one_rank(run), strict=True)
            for name in (*LOSSES, "critic/vf_loss")
            if name in theirs
        )

    def _one_rank(self, run: _Run) -> list[dict[str, float]]:
        key = replace(run, offloads=False)
        if key not in self._metrics:
            folder = self.subject(run.family, run.shape, adapts=False).folder
            config = recomputing(make_config(folder, NUM_GROUPS, **_ACTOR))
            if run.adapts:
                config = adapting(config, **_ADAPTERS)
            if run.critic:
                config = with_critic(config)
            learner = Learner(config, ParallelContext(), total_steps=10)
            self._metrics[key] = [
                learner.train_step(make_batch(NUM_GROUPS, seed=step), step) for step in _STEPS
            ]
        return self._metrics[key]
