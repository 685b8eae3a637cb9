"""Observe a run from outside, each second: steps, restarts, digests, waits, lost prompts."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.codec.messages import wait_report_from_proto
from sluice.concurrency.process import process_marks
from sluice.config.addresses import peer_address
from sluice.config.run import RunConfig
from sluice.errors import SluiceError
from sluice.rpc.client import open_channel, reward_stub, rollout_stub, trainer_stub, unary_call
from tools.chaos.bookkeeping import TrainerRestart
from tools.chaos.late_waits import ObservedWait
from tools.chaos.recovery import Yield

_LOOK_S, _TAIL_S, _ANSWER_S = 1.0, 0.2, 2.0
_RESUMED = re.compile(r"the run continues from step (\d+)")


@dataclass(frozen=True, slots=True)
class DigestReading:
    """A replica that a trainer counts as serving, and the digest of its weights."""

    trainer: str
    version: int
    replica: str
    digest: str


@dataclass(slots=True)
class Observation:
    """Everything seen; times are monotonic, those of restarts seconds since the epoch.

    Steps that were trained again are among `steps_s`. `groups` are all that ended: trained,
    filtered or dropped. `starts` holds the processes that were seen, by service.
    """

    steps_s: list[float] = field(default_factory=list)
    groups: list[Yield] = field(default_factory=list)
    restarts: list[TrainerRestart] = field(default_factory=list)
    digests: set[DigestReading] = field(default_factory=set)
    waits: list[ObservedWait] = field(default_factory=list)
    starts: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    last_step: int = 0
    serving: int = 0
    most_lost: float = 0.0
    tracebacks: Counter[str] = field(default_factory=Counter)


def digest_mismatches(sights: Iterable[DigestReading]) -> list[tuple[str, int]]:
    """Return versions of a trainer that were seen with more than one digest."""
    by_version: dict[tuple[str, int], set[str]] = {}
    for reading in sights:
        by_version.setdefault((reading.trainer, reading.version), set()).add(reading.digest)
    return sorted(key for key, digests in by_version.items() if len(digests) > 1)


class Observer:
    """Observes until it is cancelled.

    Args:
        config: of the run.
        folder: also holds log files beside the run's folder.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.seen = Observation()
        self._run_dir, self._folder = Path(config.sluice.run_dir), folder
        service = config.sluice
        self._trainer = peer_address(service.trainer.endpoint, "sluice.trainer.endpoint")
        self._reward = peer_address(service.reward.endpoint, "sluice.reward.endpoint")
        self._tails: dict[Path, _Tail] = {}

    async def run(self) -> None:
        """Read services each second, files more often."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_files(), name="reading files")
            tasks.create_task(self._ask_services(), name="asking services")

    def read_files(self) -> None:
        """Read what is new in metrics and logs."""
        for line in self._lines(self._run_dir / "metrics.jsonl"):
            row = json.loads(line)
            if "training/global_step" in row:
                self.seen.steps_s.append(time.monotonic())
                self.seen.last_step = int(row["training/global_step"])
        for line in self._lines(self._run_dir / "groups.jsonl"):
            tokens = sum(json.loads(line)["tokens"])
            self.seen.groups.append(Yield(time.monotonic(), tokens))
        for line in self._lines(self._run_dir / "logs" / "trainer.log"):
            if (match := _RESUMED.search(line)) is not None:
                self.seen.restarts.append(TrainerRestart(time.time(), int(match[1])))
            self._note_traceback("trainer", line)
        for file in (*(self._run_dir / "logs").glob("*.log"), *self._folder.glob("rollout*.log")):
            if file.stem != "trainer":
                for line in self._lines(file):
                    self._note_traceback(file.stem, line)

    def _note_traceback(self, service: str, line: str) -> None:
        if "Traceback (most recent call last)" in line:
            self.seen.tracebacks[service] += 1

    def _lines(self, file: Path) -> list[str]:
        return self._tails.setdefault(file, _Tail(file)).lines()

    async def _read_files(self) -> None:
        while True:
            self.read_files()
            await asyncio.sleep(_TAIL_S)

    async def _ask_services(self) -> None:
        while True:
            began_s = time.monotonic()
            for mark in process_marks(self._run_dir):
                self.seen.starts.setdefault(mark.name, set()).add((mark.pid, mark.started))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask_reward(), name="asking reward")
                tasks.create_task(self._ask_trainer_and_fleet(), name="asking trainer")
            await asyncio.sleep(max(0.0, _LOOK_S - (time.monotonic() - began_s)))

    async def _ask_reward(self) -> None:
        status = await _ask(
            self._reward, reward_stub, "RewardService", reward_pb2.GetStatusRequest()
        )
        if status is not None:
            self._note_waits("reward", status)
            lost = status.statistics.get("reward/prompts_lost", 0.0)
            self.seen.most_lost = max(self.seen.most_lost, abs(lost))

    async def _ask_trainer_and_fleet(self) -> None:
        status = await _ask(
            self._trainer, trainer_stub, "TrainerService", trainer_pb2.GetStatusRequest()
        )
        if status is None:
            return
        self._note_waits("trainer", status)
        serving = [one.replica for one in status.replicas if one.state == "serving"]
        self.seen.serving = len(serving)
        async with asyncio.TaskGroup() as tasks:
            for replica in serving:
                tasks.create_task(self._ask_replica(status.instance_id, replica))

    async def _ask_replica(self, trainer: str, replica: Any) -> None:  # noqa: ANN401 - untyped
        request = rollout_pb2.GetStatusRequest(without_engine=True)
        status = await _ask(replica.address, rollout_stub, "RolloutService", request)
        if status is None:
            return
        self._note_waits(status.name, status)
        if status.instance_id == replica.instance_id and status.weight_digest:
            reading = (trainer, status.policy_version, status.name, status.weight_digest)
            self.seen.digests.add(DigestReading(*reading))

    def _note_waits(self, service: str, status: Any) -> None:  # noqa: ANN401 - any status
        now_s = time.monotonic()
        self.seen.waits.extend(
            ObservedWait(now_s, service, wait.peer, wait.phase, wait.seconds)
            for wait in wait_report_from_proto(status.wait_report).waits
        )


async def _ask(
    address: str,
    stub: Any,  # noqa: ANN401 - stubs of three services
    service: str,
    request: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return a service's status; None if it does not answer."""
    async with open_channel(address, max_message_bytes=64 << 20) as channel:
        try:
            return await unary_call(
                stub(channel).GetStatus,
                request,
                name=f"{service}/GetStatus",
                peer=address,
                phase="looking from outside",
                deadline_s=_ANSWER_S,
            )
        except SluiceError:
            return None


class _Tail:
    """Whole lines of a file that grows."""

    def __init__(self, file: Path) -> None:
        self._file, self._offset = file, 0

    def lines(self) -> list[str]:
        """Return those since the last time."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").split("\n")[:-1]
