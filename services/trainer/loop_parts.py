"""What the train loop drives, as it sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.trainer.reward_client import Evaluation
from services.trainer.weight_publisher import PublishReport
from sluice.types import DataProgress, ReplicaInfo, TrainBatch


class Policy(Protocol):
    """The trained model, behind a thread of its own."""

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Updates the policy with one batch; metrics by verl's names."""
        ...

    async def freeze(self, version: int) -> None:
        """Copies the present weights so that `version` can be published while training goes on."""
        ...

    async def save(self, step: int, progress: DataProgress) -> str:
        """Writes a checkpoint; its folder."""
        ...


class TrainData(Protocol):
    """The reward service; see `RewardClient` for what each call raises."""

    async def announce(
        self,
        version: int,
        replicas: Sequence[ReplicaInfo],
        progress: Callable[[], DataProgress | None],
        /,
    ) -> None:
        """Tells the current version, who serves it and where the data set stands by then."""
        ...

    async def take_batch(
        self, step: int, version: int, generated_tokens: Callable[[], int], /
    ) -> TrainBatch:
        """The next batch, as long as there is progress."""
        ...

    async def acknowledge(self, batch_id: str, step: int) -> None:
        """Reports a batch as trained."""
        ...

    async def evaluate(
        self, version: int, examples: int, generated_tokens: Callable[[], int], /
    ) -> Evaluation:
        """Validates the announced policy, as long as there is progress."""
        ...

    async def accounts(self) -> Mapping[str, float]:
        """How the run's prompts ended."""
        ...


class Publisher(Protocol):
    """Brings weights to replicas; see `WeightPublisher`."""

    async def publish(self, version: int) -> PublishReport:
        """Sends a frozen version to the fleet."""
        ...

    async def seed_newcomers(self) -> None:
        """Sends the newest version to replicas that have none."""
        ...


class RunRecord(Protocol):
    """The run's record; see `Reporter`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a finished step."""
        ...

    def evaluation(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        """Records a validation."""
        ...

    def evaluation_failed(self, step: int, seconds: float) -> None:
        """Records that a validation gave no numbers."""
        ...

    def accounts(self, accounts: Mapping[str, float]) -> None:
        """Records how prompts and tokens ended."""
        ...
