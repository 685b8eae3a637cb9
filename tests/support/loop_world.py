"""Everything the train loop drives, as fakes that note what they were asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import numpy as np

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.fleet.publisher import PublishReport
from services.trainer.loop.accounting import RunAccountant
from services.trainer.loop.guards import RunGuards
from services.trainer.loop.run_state import RunState
from services.trainer.loop.train_loop import TrainLoop
from services.trainer.metrics.sinks import ValidationReport
from sluice.algorithm.accounting import ReplicaCounters
from sluice.algorithm.guards import GuardRecord
from sluice.algorithm.routing import AnnouncedReplica, ReplicaUse
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig, changed
from sluice.config.schema.service import GuardsConfig
from sluice.types import (
    DataProgress,
    FinishReason,
    ReplicaInfo,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)

WAIT_S = 250.0
ACCURACY = "val-core/s/acc/mean@1"
NO_GUARDS = GuardsConfig()
_BASE = load_config(
    None,
    [
        "data.train_batch_size=1",
        "actor_rollout_ref.rollout.n=1",
        "trainer.val_before_train=false",
        "sluice.trainer.replica_wait_timeout_s=5",
    ],
)
_SHARED = ("sluice.weights.backend=gloo", "actor_rollout_ref.rollout.name=vllm")


def run_config(
    *,
    validates: bool = False,
    overlaps: bool = False,
    engines_sleep: bool = False,
    staleness: int = 0,
    overrides: Sequence[str] = (),
    **trainer: Any,
) -> RunConfig:
    """A run of one sample a batch.

    Args:
        trainer: values of trainer; without any, no version is validated or saved.
    """
    steps = {"test_freq": -1, "save_freq": -1, **trainer}
    typed = [f"trainer.{key}={json.dumps(value)}" for key, value in steps.items()]
    typed += ["data.val_files=val.jsonl"] * validates
    typed += _SHARED * engines_sleep
    typed.append(f"sluice.asynchrony.max_staleness={staleness or 2 * overlaps}")
    typed.append(f"sluice.weights.overlap={'auto' if overlaps else 'off'}")
    return changed(_BASE, [*typed, *overrides])


def batch_of(step: int) -> TrainBatch:
    rollout = Rollout.of_one_turn(
        0,
        np.arange(4, dtype=np.uint32),
        np.zeros(4, np.float32),
        (VersionSpan(step - 1, 0, 4),),
        FinishReason.STOP,
        "text",
    )
    group = TrainGroup("p", np.arange(3, dtype=np.uint32), (rollout,), (Scored(1, 1, {}),), "s")
    progress = DataProgress(10 * step)
    return TrainBatch(f"batch-{step}", step - 1, (group,), progress, {"train/groups_kept": 1.0})


class World:
    """Fakes of all that the loop drives; `events` is what they were asked for, in order.

    `holds` keep an event from ending until they are released, `faults` make it fail. `uncounted`
    batches are acknowledged but not entered into the reward service's accounts.
    """

    def __init__(self, steps: int = 3, step: int = 0) -> None:
        self.events: list[str] = []
        self.holds: dict[str, asyncio.Event] = {}
        self.faults: dict[str, Exception] = {}
        self.fleet, self.state = Fleet("layout", 1e9), RunState("trainer-1", steps, step)
        self.recorded: dict[str, Any] = {}
        self.batch_of = batch_of
        self.uncounted: set[str] = set()
        self.prompts = {"submitted": 9.0, "trained": 4.0, "pending": 5.0}
        # What replicas and the reward service tell of themselves when they are asked.
        self.loads: dict[str, ReplicaCounters] = {}
        self.reported: dict[str, float] = {}
        self.published: int | None = None
        self.saved_to = set[int]()
        self.folder = Path(mkdtemp())
        finalize(self, rmtree, self.folder)
        # Of the version; a value with its standard error.
        self.accuracy_of: Callable[[int], tuple[float, float]] = lambda _version: (0.5, 0.01)
        # What a restarted reward service would receive.
        self.reported_progress: Callable[[], DataProgress | None] = lambda: None

    def loop(
        self,
        resume_from: DataProgress | None = None,
        guards: GuardsConfig = NO_GUARDS,
        record: GuardRecord = GuardRecord(),  # noqa: B008 - frozen
        reward: Any = None,
        **settings: Any,
    ) -> TrainLoop:
        accounting = RunAccountant(
            self.fleet, self.state, ask_replica=self.load_of, ask_reward=self.statistics
        )
        self.guards = RunGuards(guards, self.folder / "guards.json", self.state, record)
        return TrainLoop(
            run_config(**settings),
            20,
            learner=self,
            reward=reward or self,
            publisher=self,
            reporter=Record(self),
            accounting=accounting,
            fleet=self.fleet,
            state=self.state,
            guards=self.guards,
            resume_from=resume_from,
        )

    def register(self, name: str) -> ReplicaInfo:
        info = ReplicaInfo(name, f"{name}-1", f"{name}:1", 8)
        self.fleet.register(info, "layout", 0.0)
        return info

    async def happens(self, event: str) -> None:
        self.events.append(event)
        if event in self.faults:
            raise self.faults[event]
        if event in self.holds:
            await self.holds[event].wait()
        else:
            await asyncio.sleep(0)

    # the policy

    async def take_samples(self, outline: TrainBatch, step: int) -> str:
        return ""

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        await self.happens(f"train {step}")
        return {"actor/pg_loss": 0.5}

    async def freeze(self, version: int) -> None:
        await self.happens(f"freeze {version}")

    async def save(self, step: int, progress: DataProgress) -> str:
        await self.happens(f"save {step} at {progress.low_water}")
        self.saved_to.add(step)
        return f"folder-{step}"

    async def load(self, step: int, rate_factor: float) -> None:
        await self.happens(f"load {step} at rate {rate_factor:g}")

    def saved_steps(self) -> Collection[int]:
        return self.saved_to

    async def wait_until_saved(self) -> None:
        """Nothing is written in the background."""

    def take_memory_metrics(self) -> Mapping[str, float]:
        return {"memory_gb/update_weights": float(self.published or 0)}

    # the reward service

    async def announce(
        self,
        version: int,
        replicas: Sequence[AnnouncedReplica],
        progress: Callable[[], DataProgress | None],
        rolled_back_to: int | None,
        /,
    ) -> None:
        names = "".join(map(_shown, replicas))
        self.reported_progress, stands_at = progress, progress()
        resuming = f" from {stands_at.low_water}" if stands_at else ""
        rolled_back = "" if rolled_back_to is None else f" with the weights of {rolled_back_to}"
        await self.happens(f"announce {version} on {names}{resuming}{rolled_back}")

    async def take_batch(
        self,
        step: int,
        version: int,
        generated_tokens: Callable[[], int],
        take_samples: Callable[[TrainBatch, int], Awaitable[str]],
        /,
    ) -> TrainBatch:
        assert version == step - 1
        assert generated_tokens() >= 0
        await self.happens(f"take {step}")
        batch = self.batch_of(step)
        assert not await take_samples(batch, step)
        return batch

    async def acknowledge(self, batch_id: str, step: int) -> None:
        assert batch_id == f"batch-{step}"
        await self.happens(f"acknowledge {step}")
        if batch_id not in self.uncounted:
            self.prompts["trained"] += 1
            self.prompts["pending"] -= 1

    async def evaluate(
        self, version: int, examples: int, generated_tokens: Callable[[], int], /
    ) -> ValidationReport:
        assert generated_tokens() >= 0
        await self.happens(f"evaluate {version}")
        self.events.append(f"evaluated {version} under {self.published}")
        value, error = self.accuracy_of(version)
        return ValidationReport({ACCURACY: value}, (), 7, {ACCURACY: error})

    async def accounts(self, patience_s: float | None = None) -> Mapping[str, float]:
        await self.happens("accounts")
        return {**self.prompts, "groups_acknowledged": self.prompts["trained"], "prompts_lost": 0.0}

    async def statistics(self) -> Mapping[str, float]:
        return self.reported

    # the replicas

    async def load_of(self, replica: ReplicaInfo) -> ReplicaCounters:
        return self.loads.get(replica.name, ReplicaCounters())

    # the publisher

    async def sleep_replicas(self) -> None:
        await self.happens("sleep")

    async def wait_for_free_snapshot(self) -> None:
        if (held := self.holds.get("snapshot")) is not None:
            await held.wait()

    async def publish(self, version: int) -> PublishReport:
        await self.happens(f"publish {version}")
        members = self.fleet.in_state(MemberState.PENDING, MemberState.SERVING)
        for info in members:
            self.fleet.mark_serving(info, version)
        self.published = version
        return PublishReport(len(members), 1, 0.1, 0.01)

    async def seed_newcomers(self) -> None:
        for info in self.fleet.in_state(MemberState.PENDING):
            await self.happens(f"seed {info.name}")
            self.fleet.mark_serving(info, self.published or 0)


def _shown(replica: AnnouncedReplica) -> str:
    """The name of a replica, in brackets if it is held."""
    name = replica.info.name
    return f"[{name}]" if replica.use is ReplicaUse.VALIDATION else name


class Record:
    """The run's record."""

    def __init__(self, world: World) -> None:
        self._world = world

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._world.recorded[f"step {step}"] = dict(metrics)

    def validation(self, step: int, evaluation: ValidationReport, seconds: float) -> None:
        self._world.recorded[f"evaluation {step}"] = dict(evaluation.metrics)

    def validation_failed(self, step: int, seconds: float) -> None:
        self._world.recorded[f"failed evaluation {step}"] = seconds

    def accounts(self, accounts: Mapping[str, float]) -> None:
        self._world.recorded["accounts"] = dict(accounts)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def run(loop: TrainLoop) -> None:
    async with asyncio.timeout(WAIT_S):
        await loop.run()
