"""Check after the attack that everything is given back, and that the run still works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import grpc

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.rpc.client import reward_stub, rollout_stub, trainer_stub
from tools.fuzz.live_run import FuzzedRun
from tools.fuzz.process_size import ProcessSize
from tools.fuzz.valid_requests import DATA_SOURCE, generate_request

MAX_GROWTH_MB = 100.0
MAX_MORE_FILES, MAX_MORE_THREADS = 24, 24
HOLDER = "the fuzz run itself"
_WAIT_S = 90.0


def growth_leaks(
    before: Mapping[str, ProcessSize], after: Mapping[str, ProcessSize]
) -> dict[str, str]:
    """Return what grew by more than the bounds, by process."""
    found = {}
    for name, first in before.items():
        last = after[name]
        if last.rss_mb - first.rss_mb > MAX_GROWTH_MB:
            found[name] = f"memory: {first.rss_mb:.0f} MB, then {last.rss_mb:.0f}"
        elif last.files - first.files > MAX_MORE_FILES:
            found[name] = f"open files: {first.files}, then {last.files}"
        elif last.threads - first.threads > MAX_MORE_THREADS:
            found[name] = f"threads: {first.threads}, then {last.threads}"
    return found


class RunControl:
    """The fuzzer's requests to the run as an honest caller."""

    def __init__(self, run: FuzzedRun) -> None:
        self._run = run

    @property
    def _trainer(self) -> Any:  # noqa: ANN401  the stubs are untyped
        return trainer_stub(self._run.channels["trainer"])

    @property
    def _reward(self) -> Any:  # noqa: ANN401
        return reward_stub(self._run.channels["reward"])

    async def started(self) -> None:
        """Wait for the first step and connect to the replica."""
        self._run.connect()

        async def has_stepped() -> str | None:
            status = await self._status()
            if status.step < 1 or not status.replicas:
                return f"step {status.step} with {len(status.replicas)} replicas"
            self._run.connect(status.replicas[0].replica.address)
            return None

        await until(has_stepped, "the first step")

    async def pause(self) -> None:
        """Hold the run, so that only the attack is measured."""
        await self._trainer.Pause(trainer.PauseRequest(holder=HOLDER), timeout=20)

    async def restore(self, holders: set[str]) -> None:
        """End holds that the attack left, and notify the reward service of its trainer."""
        for holder in holders:
            with suppress(grpc.aio.AioRpcError):  # of those who left early some were refused
                await self._trainer.Resume(trainer.ResumeRequest(holder=holder), timeout=20)
        status = await self._status()
        announcement = reward.AnnouncePolicyRequest(
            trainer_instance_id=status.instance_id,
            policy_version=status.policy_version,
            replicas=[r.replica for r in status.replicas if r.state == "serving"],
        )
        await self._reward.AnnouncePolicy(announcement, timeout=60)

    async def slots_leaked(self) -> str | None:
        """Wait for an idle replica; return what stays busy, which is leaked."""

        async def is_idle() -> str | None:
            status = await self._run.replica_status()
            busy = status.slots_busy + status.queued
            return f"{status.slots_busy} busy, {status.queued} queued" if busy else None

        return await found(is_idle, "idle slots")

    async def prompts_leaked(self) -> str | None:
        """Wait until every accepted prompt is counted as ended or pending."""

        async def are_counted() -> str | None:
            status = await self._reward.GetStatus(reward.GetStatusRequest(), timeout=20)
            lost = status.statistics["reward/prompts_lost"]
            ended = sum(status.prompts_by_end.values())
            if lost or status.prompts_submitted != ended + status.prompts_pending:
                return f"{lost} prompts lost"
            return None

        return await found(are_counted, "the count of all accepted prompts")

    async def correctness_lost(self) -> str | None:
        """Check that Generate, Score and SubmitPrompts answer correctly, and that a further step is
        trained.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                return await self._generates() or await self._scores() or await self._trains()
        except Exception as error:  # noqa: BLE001  any failure is the finding
            return f"{type(error).__name__}: {error}"[:500]

    async def _generates(self) -> str | None:
        call = rollout_stub(self._run.channels["rollout-0"]).Generate(
            generate_request("after"), timeout=30
        )
        indexes = {sample.sample_index async for event in call for sample in event.rollouts}
        return None if indexes == {0, 1} else f"Generate gave samples {indexes}"

    async def _scores(self) -> str | None:
        items = [
            reward.ScoreItem(data_source=DATA_SOURCE, response=f"Answer: {n}", ground_truth="3")
            for n in (3, 4)
        ]
        answer = await self._reward.Score(reward.ScoreRequest(items=items), timeout=30)
        scores = [result.score.score for result in answer.results]
        return None if scores == [1.0, -1.0] else f"Score gave {scores}"

    async def _trains(self) -> str | None:
        await self._trainer.Resume(trainer.ResumeRequest(holder=HOLDER), timeout=20)
        step = (await self._status()).step
        turn = common.ChatMessage(role="user", content="2 + 2 = ?")
        prompt = reward.SubmitPromptsRequest(
            prompt_id=f"after-{time.time_ns()}",
            messages=[turn],
            data_source=DATA_SOURCE,
            ground_truth="4",
        )

        async def one() -> Any:  # noqa: ANN401
            yield prompt

        events = [event async for event in self._reward.SubmitPrompts(one(), timeout=_WAIT_S)]
        ends = [e.outcome.end for e in events if e.HasField("outcome")]
        if ends != [reward.PROMPT_END_TRAINED]:
            return f"SubmitPrompts gave {events}"

        async def has_stepped() -> str | None:
            return None if (await self._status()).step > step else f"still step {step}"

        return await found(has_stepped, "a further step")

    async def _status(self) -> Any:  # noqa: ANN401
        return await self._trainer.GetStatus(trainer.GetStatusRequest(), timeout=20)


async def until(check: Callable[[], Awaitable[str | None]], what: str) -> None:
    """Poll; raise RuntimeError with what is missing according to `check`."""
    missing = await found(check, what)
    if missing is not None:
        raise RuntimeError(missing)


async def found(check: Callable[[], Awaitable[str | None]], what: str) -> str | None:
    """Poll until `check` finds nothing; return what it still found after the wait."""
    ends_s = time.monotonic() + _WAIT_S
    while True:
        try:
            missing = await check()
        except grpc.aio.AioRpcError as error:
            missing = f"{error.code().name}: {error.details()}"
        if missing is None:
            return None
        if time.monotonic() > ends_s:
            return f"within {_WAIT_S:.0f} s not {what}: {missing}"
        await asyncio.sleep(0.1)
