"""Observe a run from outside, and submit prompts to it as a client.

Each second: steps, restarts, digests, waits, lost prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.client import AsyncClient, NewPrompt, RetryPolicy, RunAddress
from sluice.codec.messages import wait_report_from_proto
from sluice.concurrency.process import process_marks
from sluice.config.addresses import peer_address
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from sluice.rpc.client import open_channel, reward_stub, rollout_stub, trainer_stub, unary_call
from sluice.types import ChatMessage
from tools.chaos.verdict import ObservedWait, TrainerRestart, Yield

_LOOK_S, _TAIL_S, _ANSWER_S = 1.0, 0.2, 2.0
_SESSION_S, _PAUSE_S, _MAX_OPEN = 3.0, 0.5, 8
_LINE_CHARS = 200
_RESUMED = re.compile(r"the run continues from step (\d+)")


@dataclass(frozen=True, slots=True)
class SeenLine:
    """The beginning of a line of a log, and when it was seen."""

    at_s: float
    text: str


class Observer:
    """Observes until it is cancelled.

    Args:
        config: of the run.
        folder: also holds log files beside the run's folder.

    Attributes:
        steps_s: the end of each step, also of those that were trained again.
        groups: all groups that ended: trained, filtered or dropped.
        restarts: of the trainer.
        lines: of the logs, by service; `up` is the launcher's output.
        digests: of serving replicas' weights, by trainer and version.
        waits: as the services reported them.
        starts: processes that were seen, by service.
        max_lost: the largest number of lost prompts that the reward service counted.
        leases: of samples to programs, as it counted them last, and when that was.
        tracebacks: in the logs, by service.

    Times are monotonic; those of restarts are seconds since the epoch.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.steps_s: list[float] = []
        self.groups: list[Yield] = []
        self.restarts: list[TrainerRestart] = []
        self.lines: dict[str, list[SeenLine]] = defaultdict(list)
        self.digests: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.waits: list[ObservedWait] = []
        self.starts: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self.tracebacks: Counter[str] = Counter()
        self.last_step, self.serving, self.max_lost = 0, 0, 0.0
        self.leases = (0.0, 0)
        self._run_dir, self._folder = Path(config.sluice.run_dir), folder
        service = config.sluice
        self._trainer = peer_address(service.trainer.endpoint, "sluice.trainer.endpoint")
        self._reward = peer_address(service.reward.endpoint, "sluice.reward.endpoint")
        self._offsets: dict[Path, int] = {}

    async def run(self) -> None:
        """Query services each second, read files more often."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_files(), name="reading files")
            tasks.create_task(self._query_services(), name="querying services")

    def read_files(self) -> None:
        """Read what is new in metrics and logs."""
        for row in self._rows(self._run_dir / "metrics.jsonl"):
            if "training/global_step" in row:
                self.steps_s.append(time.monotonic())
                self.last_step = int(row["training/global_step"])
        for row in self._rows(self._run_dir / "groups.jsonl"):
            replicas = tuple(row["replicas"])
            self.groups.append(Yield(time.monotonic(), sum(row["tokens"]), replicas))
        for file in (*(self._run_dir / "logs").glob("*.log"), *self._folder.glob("*.log")):
            for line in self._lines(file):
                self.lines[file.stem].append(SeenLine(time.monotonic(), line[:_LINE_CHARS]))
                self.tracebacks[file.stem] += "Traceback (most recent call last)" in line
                if file.stem == "trainer" and (match := _RESUMED.search(line)) is not None:
                    self.restarts.append(TrainerRestart(time.time(), int(match[1])))

    def started_s(self, service: str) -> list[float]:
        """Return when the processes of a service that were seen started."""
        since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        ticks = os.sysconf("SC_CLK_TCK")
        return sorted(started / ticks - since_boot_s for _, started in self.starts[service])

    def _rows(self, file: Path) -> Iterator[dict[str, Any]]:
        """Yield the objects since the last time; a killed process leaves half a line."""
        for line in self._lines(file):
            with suppress(ValueError):
                yield json.loads(line)

    def _lines(self, file: Path) -> list[str]:
        """Return the whole lines since the last time."""
        try:
            with file.open("rb") as opened:
                opened.seek(self._offsets.get(file, 0))
                text = opened.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offsets[file] = self._offsets.get(file, 0) + len(whole)
        return whole.decode(errors="replace").split("\n")[:-1]

    async def _follow_files(self) -> None:
        while True:
            self.read_files()
            await asyncio.sleep(_TAIL_S)

    async def _query_services(self) -> None:
        while True:
            began_s = time.monotonic()
            for mark in process_marks(self._run_dir):
                self.starts[mark.name].add((mark.pid, mark.started))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._query_reward(), name="querying reward")
                tasks.create_task(self._query_trainer_and_fleet(), name="querying trainer")
            await asyncio.sleep(max(0.0, _LOOK_S - (time.monotonic() - began_s)))

    async def _query_reward(self) -> None:
        request = reward_pb2.GetStatusRequest()
        if status := await _status(self._reward, reward_stub, request):
            self._note_waits("reward", status)
            statistics = dict(status.statistics)  # which has no number for a missing name
            self.max_lost = max(self.max_lost, abs(statistics["reward/prompts_lost"]))
            self.leases = (time.monotonic(), int(statistics["reward/leases"]))

    async def _query_trainer_and_fleet(self) -> None:
        request = trainer_pb2.GetStatusRequest()
        status = await _status(self._trainer, trainer_stub, request)
        if status is None:
            return
        self._note_waits("trainer", status)
        serving = [one.replica for one in status.replicas if one.state == "serving"]
        self.serving = len(serving)
        async with asyncio.TaskGroup() as tasks:
            for replica in serving:
                tasks.create_task(self._query_replica(status.instance_id, replica))

    async def _query_replica(self, trainer: str, replica: Any) -> None:  # noqa: ANN401 - untyped
        request = rollout_pb2.GetStatusRequest(without_engine=True)
        if status := await _status(replica.address, rollout_stub, request):
            self._note_waits(status.name, status)
            if status.instance_id == replica.instance_id and status.weight_digest:
                self.digests[trainer, status.policy_version].add(status.weight_digest)

    def _note_waits(self, service: str, status: Any) -> None:  # noqa: ANN401 - any status
        now_s = time.monotonic()
        self.waits.extend(
            ObservedWait(now_s, service, wait.peer, wait.phase, wait.seconds)
            for wait in wait_report_from_proto(status.wait_report).waits
        )


async def _status(
    address: str,
    stub: Any,  # noqa: ANN401 - stubs of three services
    request: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return a service's status; None if it does not answer."""
    async with open_channel(address, max_message_bytes=64 << 20) as channel:
        try:
            return await unary_call(
                stub(channel).GetStatus,
                request,
                peer=address,
                phase="looking from outside",
                deadline_s=_ANSWER_S,
            )
        except SluiceError:
            return None


class Witness:
    """A client that submits prompts, and those again whose outcome it does not know.

    Args:
        address: of the reward service.
        rows: of the data set; their prompts are submitted.

    Attributes:
        accepted: ids with a receipt.
        refused: ids that were refused.
        num_trained: prompts reported to it as trained.
    """

    def __init__(self, address: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._address, self._rows = address, rows
        self.accepted: set[str] = set()
        self.refused: set[str] = set()
        self.num_trained = 0
        self._open: dict[str, NewPrompt] = {}
        self._count = 0

    async def run(self) -> None:
        """Submit until cancelled; call a service that is away again."""
        while True:
            if len(self._open) < _MAX_OPEN:
                self._add_prompt()
            with suppress(SluiceError, TimeoutError):
                async with asyncio.timeout(_SESSION_S):
                    await self._submit()
            await asyncio.sleep(_PAUSE_S)

    def _add_prompt(self) -> None:
        self._count += 1
        row, name = self._rows[self._count % len(self._rows)], f"witness-{self._count}"
        turn = ChatMessage("user", row["prompt"][-1]["content"])
        answer = row["reward_model"]["ground_truth"]
        self._open[name] = NewPrompt(name, (turn,), row["data_source"], answer, row["extra_info"])

    async def _submit(self) -> None:
        policy = RetryPolicy(patience_s=0.0)  # each session is one call
        async with (
            AsyncClient(RunAddress(reward=self._address), policy=policy) as client,
            aclosing(client.submit(list(self._open.values()))) as events,
        ):
            async for event in events:
                if event.event == "accepted":
                    self.accepted.add(event.prompt_id)
                    continue
                del self._open[event.prompt_id]
                self.num_trained += event.event == "trained"
                if event.event == "refused":
                    self.refused.add(event.prompt_id)
