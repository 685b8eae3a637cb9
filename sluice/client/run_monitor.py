"""The state of a run, from its trainer and its reward service. Also pause it and validate it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self

from sluice.api.reward.v1 import reward_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.channels import ServiceChannels
from sluice.client.run_address import RunAddress, RunLocation
from sluice.codec.reward import service_progress
from sluice.concurrency.waits import Waiting, deadline, run_beside, while_progressing
from sluice.errors import DeadlineError, NotReadyError, PeerError
from sluice.rpc.client import reward_stub, stream_call, trainer_stub, unary_call
from sluice.rpc.credentials import OPEN, Credentials

_TRAINER, _REWARD = "trainer", "reward service"
_HELD, _FINISHED = "paused", "finished"
_POLL_S = 0.2
_VALIDATION = ("reward/validation_prompts_done", "reward/validation_prompts")
# The lease of a killed holder ends.
_LEASE_S, _RENEWALS_PER_LEASE = 15.0, 3
# A group of the longest responses may take this long. A dead service is noticed at once.
_STALL_S = 1800.0
_LOOK_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica as the trainer sees it."""

    name: str
    address: str
    state: str
    version: int
    slots: int
    slots_busy: int
    tokens_per_second: float
    idle_share: float


@dataclass(frozen=True, slots=True)
class WatchedRule:
    """A rule of the run's guards: "watching", "no signal" or "broken", and why."""

    rule: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run at one moment.

    `metrics` come from the last finished step. `accounts` is the run's accounting by the names
    of `accounts.json`, at most some seconds old; empty before it was first taken. `awaited` is what
    the reward service waits for. `groups` counts those that are generating, grading, or kept for
    the next batch. `validation` has the prompts that the running validation has finished, and all
    of them; zeros without one. `hold_reason` is why a guard pauses the run; empty: none does.
    `instance_id` differs for each start of the trainer.
    """

    phase: str
    phase_seconds: float
    step: int
    total_steps: int
    version: int | None
    replicas: tuple[ReplicaSnapshot, ...]
    metrics: Mapping[str, float]
    prompts: Mapping[str, int] = field(default_factory=dict)
    awaited: tuple[Waiting, ...] = ()
    accounts: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    validation: tuple[int, int] = (0, 0)
    hold_reason: str = ""
    guards: tuple[WatchedRule, ...] = ()
    instance_id: str = ""


class RunMonitor:
    """Calls that look at a run, pause it and validate it. Use it as a context manager.

    Args:
        trainer: host:port of the trainer.
        reward: host:port of the reward service.
        credentials: what both are shown; see `sluice.rpc.credentials.client_credentials`.
        channels: open ones to use; None: its own.
    """

    def __init__(
        self,
        trainer: str,
        reward: str,
        *,
        credentials: Credentials = OPEN,
        channels: ServiceChannels | None = None,
    ) -> None:
        self._channels = channels or ServiceChannels(RunAddress(credentials=credentials), "")
        self._trainer = trainer_stub(self._channels.to(trainer))
        self._reward = reward_stub(self._channels.to(reward))

    @classmethod
    def of(cls, location: RunLocation) -> Self:
        """Return one with the run's credentials; raises ConfigError as they do."""
        return cls(location.trainer, location.reward, credentials=location.credentials)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the calls and close the connections."""
        await self._channels.close()

    async def snapshot(self) -> RunSnapshot:
        """Return the present state, without a reward service that does not answer.

        Raises:
            PeerError, DeadlineError: the trainer does not answer.
        """
        run = await unary_call(
            self._trainer.GetStatus,
            trainer_pb2.GetStatusRequest(),
            peer=_TRAINER,
            phase="asking for its status",
        )
        name = trainer_pb2.RunPhase.Name(run.phase)
        snapshot = RunSnapshot(
            phase=name.removeprefix("RUN_PHASE_").lower().replace("_", " "),
            phase_seconds=run.phase_seconds,
            step=run.step,
            total_steps=run.total_steps,
            version=run.policy_version if run.HasField("policy_version") else None,
            replicas=tuple(_replica_snapshot(status) for status in run.replicas),
            metrics=dict(run.metrics),
            accounts=dict(run.accounts),
            hold_reason=run.hold_reason,
            guards=tuple(
                WatchedRule(guard.rule, guard.state, guard.detail) for guard in run.guards
            ),
            instance_id=run.instance_id,
        )
        try:
            return _with_reward(snapshot, await self._reward_status())
        except (PeerError, DeadlineError):
            return snapshot

    @asynccontextmanager
    async def held(self, timeout_s: float) -> AsyncIterator[RunSnapshot]:
        """Pause training between two steps during the block, and yield the paused state.

        A run that another holder pauses too stays paused afterwards. The pause is a lease that is
        renewed during the block, so it ends soon after its holder was killed.

        Args:
            timeout_s: longest wait for the present step to end, seconds.

        Raises:
            NotReadyError: the run is ending.
            DeadlineError: the step takes longer.
        """
        holder = str(uuid.uuid4())
        await self._lease_pause(holder)
        try:
            async with run_beside(self._renew(holder), "lease of the pause"):
                yield await self._wait_until_held(timeout_s)
        finally:
            await self.resume(holder)

    async def resume(self, holder: str = "") -> int:
        """End a holder's pause; the operator's, whose name is empty, with that of the guards.

        Returns:
            the number of finished steps.

        Raises:
            PeerError, DeadlineError: the trainer does not answer.
        """
        request = trainer_pb2.ResumeRequest(holder=holder)
        phase = "asking it to resume"
        answer = await unary_call(self._trainer.Resume, request, peer=_TRAINER, phase=phase)
        return answer.step

    async def _lease_pause(self, holder: str) -> None:
        request = trainer_pb2.PauseRequest(lease_seconds=_LEASE_S, holder=holder)
        await unary_call(self._trainer.Pause, request, peer=_TRAINER, phase="asking it to pause")

    async def _renew(self, holder: str) -> None:
        """Renew the pause; fail only when the trainer has not answered for as long as it lasts."""
        ends_at, pause_s = time.monotonic() + _LEASE_S, _LEASE_S / _RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(pause_s)
            asked_at = time.monotonic()
            try:
                async with deadline(ends_at - asked_at, peer=_TRAINER, phase="renewing the pause"):
                    await self._lease_pause(holder)
                ends_at, pause_s = asked_at + _LEASE_S, _LEASE_S / _RENEWALS_PER_LEASE
            except (PeerError, DeadlineError):
                pause_s = _LEASE_S / 15
                if time.monotonic() + pause_s >= ends_at:
                    raise

    async def _wait_until_held(self, timeout_s: float) -> RunSnapshot:
        phase = "waiting for the present step to end"
        async with deadline(timeout_s, peer=_TRAINER, phase=phase):
            while (snapshot := await self.snapshot()).phase != _HELD:
                if snapshot.phase == _FINISHED or snapshot.step >= snapshot.total_steps:
                    raise NotReadyError("the run is ending; it cannot be paused any more")
                await asyncio.sleep(_POLL_S)
            return snapshot

    async def stop(self, reason: str, *, skip_validation: bool = False, save: bool = False) -> int:
        """End the run after its present step.

        Args:
            reason: for the trainer's log.
            skip_validation: do not validate the last step.
            save: write its checkpoint, whatever ``trainer.save_freq`` is.

        Returns:
            the number of finished steps.

        Raises:
            PeerError, DeadlineError: the trainer does not answer.
        """
        request = trainer_pb2.StopRequest(reason=reason, skip_validation=skip_validation, save=save)
        answer = await unary_call(
            self._trainer.Stop, request, peer=_TRAINER, phase="asking it to stop"
        )
        return answer.step

    async def steps(
        self, from_step: int = 0
    ) -> AsyncGenerator[tuple[int, Mapping[str, float]], None]:
        """Yield finished steps with their metrics until the run ends (0: from now on).

        After a call that reached its own deadline, another one continues with the next step.

        Raises:
            SluiceError: the trainer fails, or refuses the call.
        """
        following = from_step
        while True:
            opened_s = time.monotonic()
            calls = stream_call(
                self._trainer.WatchSteps,
                trainer_pb2.WatchStepsRequest(from_step=following),
                peer=_TRAINER,
                phase="watching steps",
            )
            try:
                async with aclosing(calls) as messages:
                    async for message in messages:
                        following = message.step + 1
                        yield message.step, dict(message.metrics)
            except DeadlineError as error:
                # A trainer that answers so at once would be called in a tight loop.
                if time.monotonic() - opened_s < error.seconds / 2:
                    raise
            else:
                return

    async def _reward_status(self) -> reward_pb2.GetStatusResponse:
        return await unary_call(
            self._reward.GetStatus,
            reward_pb2.GetStatusRequest(),
            peer=_REWARD,
            phase="asking for its status",
        )

    async def evaluate(
        self,
        policy_version: int,
        *,
        n: int | None,
        temperature: float | None,
        stall_s: float = _STALL_S,
    ) -> Mapping[str, float]:
        """Validate the announced policy, and return its metrics by verl's names.

        It waits while the reward service makes progress.

        Args:
            policy_version: the announced one; another one is refused.
            n: responses per prompt; None: as configured.
            temperature: of sampling; None: as configured.
            stall_s: longest time without progress, seconds.

        Raises:
            DeadlineError: nothing moved for `stall_s`.
            SluiceError: as the service failed.
        """
        phase = f"evaluating version {policy_version}"
        request = reward_pb2.EvaluateRequest(
            policy_version=policy_version, n=n, temperature=temperature
        )
        answer = await while_progressing(
            unary_call(self._reward.Evaluate, request, peer=_REWARD, phase=phase),
            self._reward_progress,
            stall_s=stall_s,
            interval_s=min(_LOOK_EVERY_S, stall_s / 4),
            peer=_REWARD,
            phase=phase,
        )
        return dict(answer.metrics)

    async def _reward_progress(self) -> str | None:
        """Return `service_progress`; None without an answer."""
        try:
            return service_progress(await self._reward_status())
        except (DeadlineError, PeerError):
            return None


def _replica_snapshot(status: trainer_pb2.ReplicaStatus) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        name=status.replica.name,
        address=status.replica.address,
        state=status.state,
        version=status.replica.policy_version,
        slots=status.replica.slots,
        slots_busy=status.slots_busy,
        tokens_per_second=status.tokens_per_second,
        idle_share=status.idle_share,
    )


def _with_reward(snapshot: RunSnapshot, status: reward_pb2.GetStatusResponse) -> RunSnapshot:
    """Return a snapshot with what the reward service knows."""
    validated, to_validate = (int(status.statistics.get(name, 0)) for name in _VALIDATION)
    return replace(
        snapshot,
        prompts={
            "submitted": status.prompts_submitted,
            "pending": status.prompts_pending,
            "prompts_lost": int(status.statistics.get("reward/prompts_lost", 0)),
            **status.prompts_by_end,
        },
        awaited=tuple(Waiting(a.peer, a.phase, a.seconds) for a in status.awaited),
        groups={
            "generating": status.groups_generating,
            "grading": status.groups_grading,
            "kept": status.groups_kept,
        },
        validation=(validated, to_validate),
    )
