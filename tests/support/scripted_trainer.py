"""A trainer and a reward service whose state is scripted: real gRPC, no run behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client.run_monitor import RunMonitor
from tests.support.rpc_server import serving
from tests.support.run_folder import ACCOUNTING, STEPS

WAITING = trainer_pb2.RUN_PHASE_WAITING_FOR_BATCH
PAUSED = trainer_pb2.RUN_PHASE_PAUSED


@dataclass
class ScriptedTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers as its fields say; `steps_to_hold` status calls pass before a pause takes effect."""

    step: int = 2
    total_steps: int = 2
    phase: Any = WAITING
    steps_to_hold: int = 2
    controls: list[str] = field(default_factory=list)
    leases_s: list[float] = field(default_factory=list)
    holders: set[str] = field(default_factory=set)
    held_elsewhere: bool = False
    hold_reason: str = ""
    never_ends: bool = False

    async def GetStatus(self, request: Any, context: Any) -> Any:
        if self.controls[-1:] == ["pause"]:
            self.steps_to_hold -= 1
            if self.steps_to_hold <= 0:
                self.phase = PAUSED
        replica = common_pb2.Replica(name="rollout-0", address="127.0.0.1:1", slots=8)
        return trainer_pb2.GetStatusResponse(
            phase=self.phase,
            step=self.step,
            total_steps=self.total_steps,
            policy_version=self.step,
            replicas=[trainer_pb2.ReplicaStatus(replica=replica, state="serving")],
            metrics=_numbers(self.step),
            accounts=ACCOUNTING,
            hold_reason=self.hold_reason,
        )

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for step in range(max(request.from_step, 1), self.step + 1):
            yield trainer_pb2.WatchStepsResponse(step=step, metrics=_numbers(step))
        if self.never_ends:
            await asyncio.Event().wait()

    async def Pause(self, request: Any, context: Any) -> Any:
        self.controls += ["pause"] if self.controls[-1:] != ["pause"] else []
        self.leases_s.append(request.lease_seconds)
        self.holders.add(request.holder)
        return trainer_pb2.PauseResponse(step=self.step)

    async def Resume(self, request: Any, context: Any) -> Any:
        self.controls.append("resume")
        if request.holder:
            self.holders.remove(request.holder)
        else:  # the operator, who also ends the guards' hold
            self.hold_reason = ""
        if not (self.holders or self.held_elsewhere):
            self.phase = WAITING
        return trainer_pb2.ResumeResponse(step=self.step)


def _numbers(step: int) -> dict[str, float]:
    if step == 0:
        return {}
    return {name: value for name, value in STEPS[step - 1].items() if value is not None}


@dataclass
class ScriptedReward(reward_pb2_grpc.RewardServiceServicer):
    """Accepts every prompt but those named ``bad``, and trains the accepted ones in step 1.

    A validation ends at the `looks_to_evaluate`-th status call; each of them finds another group
    validated as long as the service `moves`. Without `outside`, samples wait for nobody; else each
    call finds them longer with this peer.
    """

    looks_to_evaluate: int = 0
    moves: bool = True
    outside: str = ""
    looks: int = 0
    prompts_lost: int = 0
    was_cancelled: bool = False
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.looks += 1
        self.looked.set()
        validated = float(self.looks if self.moves else 0)
        wait = reward_pb2.Awaited(peer=self.outside, phase="working on samples", seconds=self.looks)
        return reward_pb2.GetStatusResponse(
            prompts_submitted=3,
            prompts_pending=1,
            awaited=[wait] if self.outside else [],
            statistics={
                "reward/validation_groups": validated,
                "reward/prompts_lost": self.prompts_lost,
            },
        )

    async def SubmitPrompts(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        accepted = []
        async for request in request_iterator:
            refused = "the id is taken" if request.prompt_id == "bad" else ""
            accepted += [] if refused else [request.prompt_id]
            receipt = reward_pb2.PromptReceipt(prompt_id=request.prompt_id, refused_because=refused)
            yield reward_pb2.SubmitPromptsResponse(receipt=receipt)
        for prompt_id in accepted:
            yield reward_pb2.SubmitPromptsResponse(
                outcome=reward_pb2.PromptOutcome(
                    prompt_id=prompt_id, end=reward_pb2.PROMPT_END_TRAINED, step=1, rewards=[1, -1]
                )
            )

    async def Evaluate(self, request: Any, context: Any) -> Any:
        try:
            while self.looks < self.looks_to_evaluate:
                self.looked.clear()
                await self.looked.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return reward_pb2.EvaluateResponse(metrics={"version": request.policy_version})


@asynccontextmanager
async def monitored(trainer: ScriptedTrainer) -> AsyncIterator[RunMonitor]:
    """A monitor of a scripted run."""
    async with (
        serving(trainer=trainer, reward=ScriptedReward()) as server,
        RunMonitor(server.address, server.address) as monitor,
        asyncio.timeout(240),
    ):
        yield monitor
