"""Measure admissions per second of one core, with the parts that decide in the reward service."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, cast

from services.reward.generation.queue import ReplicaQueue
from services.reward.generation.request import prompt_key
from services.reward.group import Group, GroupEnding, GroupTable
from services.reward.groups.admission import GroupAdmission
from services.reward.groups.leases import ChangeSignal, TrainBatches, YieldGuard
from services.reward.groups.settings import BatchRules, PipelineSettings
from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.quarantine import Quarantine
from sluice.algorithm.groups.staleness import GroupAges
from sluice.algorithm.routing import AnnouncedReplica
from sluice.algorithm.sampling.pacing import AdmissionOrder
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.types import ChatMessage, Prompt, PromptEnd, PromptOrigin, ReplicaInfo, SamplingParams

if TYPE_CHECKING:
    from services.reward.prompts.source import PromptSource
    from services.reward.records.statistics import GroupStatistics

_BATCH, _STALENESS, _GROUP = 4096, 3, 16
_REPLICAS, _SLOTS = 1024, 256
_REPEATS = 20_000


def admissions_per_second(num_in_flight: int) -> float:
    """Admit one prompt at a time with so many groups in flight on 1,024 replicas, `stream`.

    An admission decides: how many may start, by the fleet's capacity and the groups in flight, once
    before and once after the prompt was read; which waiting prompt is next, and whether it is in
    quarantine; the prompt's key, its attempt and the group's entry; when it starts, whether any
    group is left without a batch slot. Another group ends for each that starts. Reading the prompt,
    the ledger and calls are not measured. Seconds are of the processor: one thread decides, and
    other load of the machine is not measured.
    """
    world = _World()
    prompts = [_prompt(sequence) for sequence in range(_BATCH + num_in_flight + _REPEATS)]
    for prompt in prompts[:_BATCH]:
        world.line_up(prompt)
    for prompt in prompts[_BATCH : _BATCH + num_in_flight]:
        world.admit(prompt)
    began_s = time.process_time()
    for prompt in prompts[_BATCH + num_in_flight :]:
        world.admit(prompt)
        world.end_oldest()
    return _REPEATS / (time.process_time() - began_s)


class _World:
    def __init__(self) -> None:
        rules = BatchRules(_BATCH, _STALENESS, "wait")
        self.strategy = SamplingStrategy(
            SamplingRules(StrategyName.STREAM, _BATCH, _STALENESS, _GROUP)
        )
        ledger = PromptLedger()
        self._groups = GroupTable(ledger, GroupAges(_BATCH, _STALENESS, "wait"))
        self._groups.policy_version = 0
        source, statistics = cast("PromptSource", None), cast("GroupStatistics", None)  # not used
        self._quarantine = Quarantine(ledger, None)
        self._batches = TrainBatches(
            groups=self._groups,
            ledger=ledger,
            source=source,
            strategy=self.strategy,
            statistics=statistics,
            guard=YieldGuard(0.0, 1),
            rules=rules,
            changes=ChangeSignal(),
        )
        queue = ReplicaQueue(1.5, lambda: None)
        sampling = SamplingParams(1.0, 1.0, -1, 1024, 0)
        self._admission = GroupAdmission(
            settings=PipelineSettings(rules, _GROUP, sampling, "acc"),
            groups=self._groups,
            batches=self._batches,
            strategy=self.strategy,
            source=source,
            queue=queue,
            memory=None,
            quarantine=self._quarantine,
        )
        replicas = [ReplicaInfo(f"r{i}", "0", f"r{i}:1", _SLOTS) for i in range(_REPLICAS)]
        queue.announce([AnnouncedReplica(replica, 0) for replica in replicas])
        self._running: deque[Group] = deque()
        self._order, self._in_line = AdmissionOrder(), dict[int, Group]()

    def line_up(self, prompt: Prompt) -> None:
        """Let the prompt wait beside the others."""
        expected = 1_000.0 + prompt.sequence * 7_919 % 1_000  # as if it had been visited
        self._order.add(prompt.sequence, expected, 0)
        self._in_line[prompt.sequence] = self._groups.accept(prompt)

    def admit(self, prompt: Prompt) -> None:
        for _ in range(2):
            assert self._admission.num_to_start() > 0
        self.line_up(prompt)
        group = self._in_line.pop(self._order.take(0, 1_500.0))
        assert self._quarantine.reason(group.prompt) is None
        key = prompt_key(group.prompt)
        attempt = self.strategy.attempt(key, group.prompt.sequence, None, 0)
        self.strategy.started(attempt)
        self._groups.admit(group, attempt, _GROUP)
        self._groups.set_start_version(group, 0)
        self._batches.cancel_expired()
        self._running.append(group)

    def end_oldest(self) -> None:
        self._groups.end(self._running.popleft(), GroupEnding(PromptEnd.FILTERED_ALL_WRONG))


def _prompt(sequence: int) -> Prompt:
    return Prompt(
        f"data-{sequence}",
        sequence,
        (ChatMessage("user", f"What is {sequence} + {sequence}? " * 8),),
        "math_dapo",
        str(2 * sequence),
        PromptOrigin.DATASET,
        sequence,
    )
