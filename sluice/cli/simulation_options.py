"""The options of `sluice simulate`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.algorithm.sampling.rules import StrategyName
from sluice.errors import ConfigError

Mixture = Annotated[
    Literal["early", "mid", "late"] | None,
    typer.Option(help="Workload; none: mid. Not with --run."),
]
Strategy = Annotated[
    StrategyName | None, typer.Option(help="Strategy; none: stream, or the run's.")
]
Replicas = Annotated[
    int | None, typer.Option(min=1, help="Rollout replicas; none: 8. Not with --run.")
]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences a replica generates at once; none: 128. Not with --run."),
]
Steps = Annotated[
    int | None,
    typer.Option(min=2, help="Batches; the first third warms up. none: 240, or the run's."),
]
MaxStaleness = Annotated[
    int | None, typer.Option(min=0, help="S, versions; none: 4, or the run's. rounds: 0.")
]
AheadShare = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1.0, help="Share of S batches that may be drawn ahead; none: 1, or the run's."
    ),
]
WhenStale = Annotated[
    Literal["wait", "drop"] | None, typer.Option(help="none: wait, or the run's.")
]
GroupSize = Annotated[
    int | None, typer.Option(min=2, help="Samples of a group; none: 16. Not with --run.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Groups of a batch; none: 64. Not with --run.")
]
GenBatchSize = Annotated[
    int | None,
    typer.Option(
        min=0, help="rounds: prompts of a wave; 0 or none: as many as a batch. Not with --run."
    ),
]
TrainerSeconds = Annotated[
    float | None, typer.Option(min=0, help="Seconds to train a batch; none: 60. Not with --run.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Run = Annotated[
    Path | None,
    typer.Option(help="Folder of a run: fit workload, fleet and trainer to its record."),
]
Compare = Annotated[bool, typer.Option("--compare", help="All strategies side by side.")]
SweepGrid = Annotated[
    bool, typer.Option("--sweep", help="A grid of replicas and S; recommends the cheapest.")
]
Plot = Annotated[Path | None, typer.Option(help="Folder to write PNG files to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Model:
    """Options of a simulation without a run, named as they are; ``None``: it was not given."""

    mixture: str | None
    replicas: int | None
    slots: int | None
    group_size: int | None
    batch_size: int | None
    gen_batch_size: int | None
    trainer_s: float | None

    def refuse_beside_run(self) -> None:
        """Refuses what a run's folder says.

        Raises:
            ConfigError: one was given.
        """
        for field in fields(self):
            if getattr(self, field.name) is not None:
                option = "--" + field.name.replace("_", "-")
                raise ConfigError(
                    f"{option}: a run's folder says this itself; leave out {option} or --run"
                )
