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
    typer.Option(help="Workload; none: mid. Not with --run or --workload."),
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option(
        "--workload",
        help="YAML or JSON file with distributions of pass rates and lengths. Not with --run.",
    ),
]
Strategy = Annotated[
    StrategyName | None, typer.Option(help="Strategy; none: stream, or the run's.")
]
Replicas = Annotated[
    int | None, typer.Option(min=1, help="Rollout replicas; none: 8, or the run's.")
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequences a replica generates at once; none: 128, or the run's max_num_seqs."
    ),
]
StepMs = Annotated[
    float | None,
    typer.Option(
        min=0, help="Milliseconds of a decoding step by itself; none: 20, or fitted to the run."
    ),
]
SequenceMs = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Milliseconds that each running sequence adds to a decoding step; none: 0.1, or "
        "fitted.",
    ),
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
OnPolicyFill = Annotated[
    Literal["exact", "expected"] | None,
    typer.Option(
        help="At S = 0: groups that a batch surely needs, or is expected to. none: expected, "
        "or the run's."
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
        min=0,
        help="rounds: prompts of a wave; 0: as many as a batch. none: that, or the run's.",
    ),
]
TrainerSeconds = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds to train a batch; none: 60, or the run's mean."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Run = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a run: fit workload, fleet and trainer to its record. Options of fleet, "
        "trainer and waves change these with --compare or --sweep only."
    ),
]
Compare = Annotated[bool, typer.Option("--compare", help="All strategies side by side.")]
SweepGrid = Annotated[
    bool, typer.Option("--sweep", help="A grid of replicas and S; recommends the cheapest.")
]
Plot = Annotated[Path | None, typer.Option(help="Folder to write PNG files to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


_OF_RECORD = {
    "mixture": "the run's own groups are the workload",
    "workload": "the run's own groups are the workload",
    "group_size": "its groups are recorded with the samples that they had",
    "batch_size": "what its policy had learnt at each version, and how long it trained, is "
    "recorded of batches of its own size",
}
"""What a record cannot answer otherwise, and why."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is simulated, options named as they are; ``None``: it was not given."""

    mixture: str | None = None
    workload: Path | None = None
    replicas: int | None = None
    slots: int | None = None
    step_ms: float | None = None
    sequence_ms: float | None = None
    group_size: int | None = None
    batch_size: int | None = None
    gen_batch_size: int | None = None
    trainer_s: float | None = None

    def refuse_beside_run(self, *, asks_what_if: bool) -> None:
        """Refuses what a run's folder says, and what its record cannot answer.

        Args:
            asks_what_if: ``--compare`` or ``--sweep`` was given, for which a run's fleet, trainer
                and waves may be others.

        Raises:
            ConfigError: one was given.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            option = "--" + field.name.replace("_", "-")
            if field.name in _OF_RECORD:
                raise ConfigError(
                    f"{option}: {value} beside --run: {_OF_RECORD[field.name]}; leave out {option} "
                    "or --run"
                )
            if not asks_what_if:
                raise ConfigError(
                    f"{option}: {value} beside --run: a run is set beside its own simulation, and "
                    f"its folder says this; leave out {option}, or give --compare or --sweep to "
                    "see what it would change"
                )

    def refuse_two_workloads(self) -> None:
        """Refuses a mixture and a file at once.

        Raises:
            ConfigError: both were given.
        """
        if self.mixture is not None and self.workload is not None:
            raise ConfigError(
                f"--workload: {self.workload} and --mixture {self.mixture} both name the workload; "
                "leave one out"
            )
