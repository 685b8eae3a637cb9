"""Check after the attack that everything is given back, and that the run still works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.client import (
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    NewPrompt,
    Sampling,
    ScoreItem,
)
from sluice.errors import SluiceError
from sluice.rpc.client import reward_stub, trainer_stub
from sluice.types import Scored
from tools.fuzz.messages import DATA_SOURCE

# Growth that is still no leak: megabytes of resident memory, open files, threads.
_BOUNDS = {"memory, MB": 100.0, "open files": 24.0, "threads": 24.0}
_HOLDER = "the fuzz run itself"
_EXPIRED = ["accepted", "dropped_failed"]
_WAIT_S, _CALL_S = 240.0, 60.0
_TURN = ChatMessage("user", "2 + 2 = ?")
Size = dict[str, float]


def size_of(pid: int) -> Size:
    """Return the size of a process by the names of `_BOUNDS`; raise OSError if there is none."""
    proc = Path("/proc") / str(pid)
    lines = (proc / "status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    memory_mb = int(status["VmRSS"].split()[0]) / 1024
    figures = (memory_mb, sum(1 for _ in (proc / "fd").iterdir()), int(status["Threads"]))
    return dict(zip(_BOUNDS, figures, strict=True))


def growth_leaks(before: Mapping[str, Size], after: Mapping[str, Size]) -> dict[str, str]:
    """Return what grew by more than the bounds, by process."""
    return {
        name: f"{what}: {first[what]:.0f}, then {after[name][what]:.0f}"
        for name, first in before.items()
        for what, bound in _BOUNDS.items()
        if after[name][what] - first[what] > bound
    }


class HonestCaller:
    """The fuzzer's calls to the run as an honest caller.

    Args:
        client: of the run.
        channels: to ``trainer`` and ``reward``.
    """

    def __init__(self, client: AsyncClient, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._client = client
        # The stubs are untyped.
        self._trainer: Any = trainer_stub(channels["trainer"])
        self._reward: Any = reward_stub(channels["reward"])

    async def pause(self) -> None:
        """Hold the run, so that only the attack is measured."""
        await self._trainer.Pause(trainer.PauseRequest(holder=_HOLDER), timeout=_CALL_S)

    async def restore(self, holders: set[str]) -> None:
        """End holds that the attack left, and announce the policy as the trainer would."""
        for holder in holders:
            with suppress(grpc.aio.AioRpcError):  # of callers that left early some were refused
                await self._trainer.Resume(trainer.ResumeRequest(holder=holder), timeout=_CALL_S)
        status = await self._status()
        announcement = reward.AnnouncePolicyRequest(
            trainer_instance_id=status.instance_id,
            policy_version=status.policy_version,
            replicas=[r.replica for r in status.replicas if r.state == "serving"],
        )
        await self._reward.AnnouncePolicy(announcement, timeout=60)

    async def leaks(self) -> dict[str, str]:
        """Return what is wrong by name: slots, correctness, prompts."""
        slots = await _wait_for_none("idle slots", self._busy_slots)
        try:
            async with asyncio.timeout(_WAIT_S):
                incorrect = await self._generates() or await self._scores() or await self._trains()
        except Exception as error:  # noqa: BLE001  any failure is the finding
            incorrect = f"{type(error).__name__}: {error}"[:500]
        prompts = await _wait_for_none("the count of all accepted prompts", self._uncounted_prompts)
        found = {"slots": slots, "correctness": incorrect, "prompts": prompts}
        return {name: text for name, text in found.items() if text is not None}

    async def _busy_slots(self) -> str | None:
        busy = sum(replica.slots_busy for replica in await self._client.replicas())
        return f"{busy} busy or queued" if busy else None

    async def _uncounted_prompts(self) -> str | None:
        status = await self._reward.GetStatus(reward.GetStatusRequest(), timeout=_CALL_S)
        lost = status.statistics["reward/prompts_lost"]
        ended = sum(status.prompts_by_end.values())
        if lost or status.prompts_submitted != ended + status.prompts_pending:
            return f"{lost} prompts lost"
        return None

    async def _generates(self) -> str | None:
        options = GenerateOptions(n=2, sampling=Sampling(max_tokens=6, seed=1))
        found = await self._client.generate([_TURN], options)
        indexes = [rollout.sample_index for rollout in found.rollouts]
        return None if indexes == [0, 1] else f"Generate gave samples {indexes}"

    async def _scores(self) -> str | None:
        items = [ScoreItem(DATA_SOURCE, f"Answer: {n}", "3") for n in (3, 4)]
        found = [
            one.score if isinstance(one, Scored) else one for one in await self._client.score(items)
        ]
        return None if found == [1.0, -1.0] else f"Score gave {found}"

    async def _trains(self) -> str | None:
        await self._trainer.Resume(trainer.ResumeRequest(holder=_HOLDER), timeout=_CALL_S)
        step = (await self._status()).step
        # On a busy machine the leases of its samples may expire; then another prompt is trained.
        events = _EXPIRED
        while events == _EXPIRED:
            prompt = NewPrompt(f"after-{time.time_ns()}", (_TURN,), DATA_SOURCE, "4")
            events = [one.event async for one in self._client.submit([prompt])]
        if events != ["accepted", "trained"]:
            return f"SubmitPrompts gave {events}"

        async def missing_step() -> str | None:
            return None if (await self._status()).step > step else f"still step {step}"

        return await _wait_for_none("a further step", missing_step)

    async def _status(self) -> Any:  # noqa: ANN401
        return await self._trainer.GetStatus(trainer.GetStatusRequest(), timeout=_CALL_S)


async def _wait_for_none(what: str, check: Callable[[], Awaitable[str | None]]) -> str | None:
    """Poll until `check` finds nothing; return what it still found after the wait."""
    ends_s = time.monotonic() + _WAIT_S
    while True:
        try:
            found = await check()
        except (grpc.aio.AioRpcError, SluiceError) as error:
            found = str(error)
        if found is None or time.monotonic() > ends_s:
            return found and f"within {_WAIT_S:.0f} s not {what}: {found}"
        await asyncio.sleep(0.1)
