"""The options of `sluice simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sluice.algorithm.sampling.rules import StrategyName

Mixture = Annotated[
    Literal["early", "mid", "late"] | None,
    typer.Option(help="Workload; none: mid. Not with --workload."),
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option("--workload", help="YAML file with distributions of pass rates and lengths."),
]
Strategy = Annotated[StrategyName | None, typer.Option(help="Strategy; none: stream.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Rollout replicas; none: 8.")]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences a replica generates at once; none: 128."),
]
StepMs = Annotated[
    float | None,
    typer.Option(min=0, help="Milliseconds of a decoding step without sequences; none: 20."),
]
SequenceMs = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Milliseconds that each running sequence adds to a decoding step; none: 0.1.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=2, help="Batches; the first third warms up. none: 240."),
]
MaxStaleness = Annotated[int | None, typer.Option(min=0, help="S, versions; none: 4. rounds: 0.")]
AheadShare = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1.0, help="Share of S batches that may be generated ahead; none: 1."
    ),
]
OnPolicyFill = Annotated[
    Literal["exact", "expected"] | None,
    typer.Option(
        help="At S = 0: how a batch fills; see sluice.sampling.on_policy_fill. none: expected."
    ),
]
WhenStale = Annotated[Literal["wait", "drop"] | None, typer.Option(help="none: wait.")]
GroupSize = Annotated[int | None, typer.Option(min=2, help="Samples of a group; none: 16.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Groups of a batch; none: 64.")]
GenBatchSize = Annotated[
    int | None, typer.Option(min=1, help="rounds: prompts of a wave; none: as many as a batch.")
]
TrainerSeconds = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds to train a batch; none: 60."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]
Compare = Annotated[bool, typer.Option("--compare", help="Compare all strategies.")]
