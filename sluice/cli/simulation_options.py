"""The options of `sluice simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.algorithm.sampling.rules import StrategyName

Mixture = Annotated[
    Literal["early", "mid", "late"], typer.Option(help="Workload, if no run is given.")
]
Strategy = Annotated[
    StrategyName | None, typer.Option(help="Strategy; none: stream, or the run's.")
]
Replicas = Annotated[int, typer.Option(min=1, help="Rollout replicas.")]
Slots = Annotated[int, typer.Option(min=1, help="Sequences a replica generates at once.")]
Steps = Annotated[
    int | None, typer.Option(min=2, help="Batches; the first third warms up. none: 240.")
]
MaxStaleness = Annotated[
    int | None, typer.Option(min=0, help="S, versions; none: 4, or the run's. rounds: 0.")
]
WhenStale = Annotated[
    Literal["wait", "drop"] | None, typer.Option(help="none: wait, or the run's.")
]
GroupSize = Annotated[int, typer.Option(min=2, help="Samples of a group.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Groups of a batch.")]
GenBatchSize = Annotated[
    int, typer.Option(min=0, help="rounds: prompts of a wave; 0: as many as a batch.")
]
TrainerSeconds = Annotated[float, typer.Option(min=0, help="Seconds to train a batch.")]
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
