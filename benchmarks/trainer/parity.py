"""Gradients and losses of real gloo ranks in every layout, against one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import ROOT, print_line
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel
from services.trainer.learner.update.loss import LOSSES
from tests.support.rank_parity import compare, make_subject
from tests.support.rank_peer import NUM_GROUPS
from tests.support.tiny_policy import (
    adapting,
    make_batch,
    make_config,
    recomputing,
    save_model,
)
from tests.support.trainer_ranks import end, trainer

PAGE = ROOT / "docs" / "parallelism.md"
_BEGIN, _END = "<!-- parity: begin -->", "<!-- parity: end -->"
_STEPS = (1, 2, 3)
_ADAPTERS = {"lora_rank": 3, "lora_alpha": 6.0}
_ACTOR: dict[str, Any] = {
    "ppo_micro_batch_size_per_gpu": 3,
    "ppo_mini_batch_size": 2,
    "entropy_coeff": 0.01,
}
_DENSE, _MOE = ("qwen3", "qwen2", "llama"), ("qwen3_moe",)
_ALL = tuple(product((False, True), (False, True)))
# Adapters, recompute. The other two families differ from Qwen3 within a layer only.
_VARIANTS = {"qwen3": _ALL, "qwen2": _ALL[1:2], "llama": _ALL[2:3], "qwen3_moe": _ALL}


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a layout; `copy` ranks of each tensor index hold the model once."""

    ranks: int
    copy: int
    sequence: int = 1
    experts: int = 1
    tensor: int = 1

    @property
    def keys(self) -> dict[str, int]:
        """Return FSDP's keys."""
        return {
            "fsdp_size": self.copy,
            "ulysses_sequence_parallel_size": self.sequence,
            "expert_parallel_size": self.experts,
            "tensor_parallel_size": self.tensor,
        }

    @property
    def name(self) -> str:
        """Return the layout in words."""
        copies = self.ranks // (self.copy * self.tensor)
        shared = f"HSDP, {copies} copies" if copies > 1 else "FSDP2"
        sequence = f" × sequence {self.sequence}" if self.sequence > 1 else ""
        tensor = f" × tensor {self.tensor}" if self.tensor > 1 else ""
        experts = f" × experts {self.experts}" if self.experts > 1 else ""
        return shared + sequence + tensor + experts

    @property
    def families(self) -> tuple[str, ...]:
        """Return the models that are tried; where experts are divided, only those that have any."""
        return _MOE if self.experts > 1 else _DENSE + _MOE


LAYOUTS = (
    Layout(4, 4),
    Layout(4, 2),
    Layout(4, 4, sequence=2),
    Layout(4, 2, sequence=2),
    Layout(4, 4, sequence=4),
    Layout(4, 4, experts=2),
    Layout(4, 4, experts=4),
    Layout(4, 2, experts=2),
    Layout(4, 4, sequence=2, experts=2),
    Layout(4, 4, sequence=2, experts=4),
    Layout(4, 2, sequence=2, experts=2),
    Layout(4, 4, sequence=4, experts=2),
    Layout(8, 8),
    Layout(8, 4, sequence=2),
    Layout(8, 4, sequence=4),
    Layout(8, 8, experts=4),
    Layout(8, 4, sequence=2, experts=2),
    Layout(8, 8, sequence=2, experts=8),
    Layout(8, 8, sequence=4, experts=4),
    Layout(8, 4, sequence=4, experts=4),
    Layout(4, 2, tensor=2),
    Layout(4, 1, tensor=2),
    Layout(4, 2, sequence=2, tensor=2),
    Layout(4, 2, tensor=2, experts=2),
    Layout(4, 2, tensor=2, experts=4),
    Layout(4, 2, sequence=2, tensor=2, experts=2),
    Layout(8, 4, sequence=2, tensor=2),
    Layout(8, 2, sequence=2, tensor=2),
    Layout(8, 4, sequence=2, tensor=2, experts=4),
    Layout(8, 4, sequence=2, tensor=2, experts=8),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a layout: the worst gradient error, and that of the losses of a DAPO run."""

    layout: Layout
    cases: int
    gradient: float
    run: str
    loss: float


def parity() -> dict[str, Any]:
    """Return the figures, and the rows of the table under ``rows``."""
    with tempfile.TemporaryDirectory() as folder:
        rows = list(_rows(Path(folder)))
    return {
        "parity_worst": _worst(row.gradient for row in rows),
        "parity_cases": sum(row.cases for row in rows),
        "dapo_loss_worst": _worst(row.loss for row in rows),
        "rows": rows,
    }


def _worst(errors: Iterable[float]) -> float:
    """Return the largest; nan if one is, which `max` may pass over."""
    return float(np.max(list(errors)))


def _rows(scratch: Path) -> Iterator[Row]:
    subjects = {
        (family, adapts): make_subject(scratch / f"{family}-{adapts}", family, adapts=adapts)
        for family, adapts in product(_DENSE + _MOE, (False, True))
    }
    one = _OneRank({family: save_model(scratch / family, family) for family in _DENSE + _MOE})
    for number, layout in enumerate(LAYOUTS):
        passes = [
            (subjects[family, adapts], recomputes)
            for family in layout.families
            for adapts, recomputes in _VARIANTS[family]
        ]
        errors = [found.error for found in compare(layout.ranks, layout.keys, passes, scratch)]
        # Families take turns, and every other run trains adapters.
        family, adapts = layout.families[number % len(layout.families)], number % 2 == 1
        loss = one.difference(layout, family, adapts)
        run = f"{family}{', adapters' if adapts else ''}"
        worst = _worst(errors)
        print_line(
            f"{layout.ranks} ranks, {layout.name}: {len(errors)} gradients within "
            f"{worst:.1e}; DAPO, {run}: within {loss:.1e}"
        )
        yield Row(layout, len(errors), worst, run, loss)


class _OneRank:
    """Three steps of DAPO on one rank in this process, and their difference from several."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._metrics = cache(self._train)

    def difference(self, layout: Layout, family: str, adapts: bool) -> float:
        """Return the largest difference of a loss; with layers recomputed on four ranks."""
        keys = {"dtype": "float32", **layout.keys}
        with trainer(
            self._folders[family],
            layout.ranks,
            recomputes=layout.ranks == 4,
            adapters=_ADAPTERS if adapts else None,
            **_ACTOR | {"fsdp_config": keys},
        ) as ranks:
            found = [ranks[0].command(f"train {step}") for step in _STEPS]
            end(ranks)
        return _worst(
            abs(ours[name] - theirs[name])
            for ours, theirs in zip(found, self._metrics(family, adapts), strict=True)
            for name in LOSSES
            if name in theirs
        )

    def _train(self, family: str, adapts: bool) -> list[dict[str, float]]:
        config = recomputing(make_config(self._folders[family], NUM_GROUPS, **_ACTOR))
        if adapts:
            config = adapting(config, **_ADAPTERS)
        learner = Learner(config, DataParallel(), total_steps=10)
        return [learner.train_step(make_batch(NUM_GROUPS, seed=step), step) for step in _STEPS]


def write_table(rows: Sequence[Row]) -> None:
    """Replace the table of docs/parallelism.md."""
    lines = [
        "| ranks | layout | models | gradients | worst error | DAPO run | worst loss |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.layout.ranks} | {row.layout.name} | {', '.join(row.layout.families)} "
            f"| {row.cases} | {row.gradient:.1e} | {row.run} | {row.loss:.1e} |"
            for row in rows
        ),
    ]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")
