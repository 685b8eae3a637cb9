"""Measure admissions per second of one core, with the parts that decide in the reward service."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, cast

from services.reward.generation.queue import ReplicaQueue
from services.reward.generation.request import prompt_key
from services.reward.groups.admission import GroupAdmission, GroupAdmissionParts, StaleGroups
from services.reward.groups.batcher import Batcher, BatchRules
from services.reward.groups.group import InFlightItem, InFlightTable
from services.reward.groups.settings import PipelineSettings
from services.reward.ledger.ledger import MemoryLedger
from services.reward.prompts.quarantine import Quarantine
from sluice.algorithm.routing import AnnouncedReplica
from sluice.algorithm.sampling.pacing import AdmissionOrder
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.types import ChatMessage, Prompt, PromptOrigin, ReplicaInfo, SamplingParams

if TYPE_CHECKING:
    from services.reward.prompts.source import PromptSource
    from services.reward.records.outcomes import OutcomeRecorder

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
        sampling_rules = SamplingRules(StrategyName.STREAM, _BATCH, _STALENESS, _GROUP)
        self.strategy = SamplingStrategy(sampling_rules)
        batcher, queue = Batcher(rules), ReplicaQueue(1.5, lambda: None)
        self._in_flight = InFlightTable(batcher.ages)
        self._stale = StaleGroups(batcher, self._in_flight, sampling_rules)
        sampling = SamplingParams(1.0, 1.0, -1, 1024, 0)
        settings = PipelineSettings(rules, _GROUP, sampling, "acc")
        source, recorder = cast("PromptSource", None), cast("OutcomeRecorder", None)  # not asked
        quarantine = Quarantine(MemoryLedger(), None)
        parts = GroupAdmissionParts(
            self.strategy, source, queue, batcher, self._in_flight, recorder, None, quarantine
        )
        self._admission = GroupAdmission(settings, parts, lambda: 0)
        replicas = [ReplicaInfo(f"r{i}", "0", f"r{i}:1", _SLOTS) for i in range(_REPLICAS)]
        queue.announce([AnnouncedReplica(replica, 0) for replica in replicas])
        self._items: deque[InFlightItem] = deque()
        self._order, self._in_line = AdmissionOrder(), dict[int, Prompt]()
        self._quarantine = quarantine

    def line_up(self, prompt: Prompt) -> None:
        """Let the prompt wait beside the others."""
        expected = 1_000.0 + prompt.sequence * 7_919 % 1_000  # as if it had been visited
        self._order.add(prompt.sequence, expected, 0)
        self._in_line[prompt.sequence] = prompt

    def admit(self, prompt: Prompt) -> None:
        for _ in range(2):
            assert self.strategy.num_to_start(self._admission.load(0)) > 0
        self.line_up(prompt)
        prompt = self._in_line.pop(self._order.take(0, 1_500.0))
        assert self._quarantine.reason(prompt) is None
        attempt = self.strategy.attempt(prompt_key(prompt), prompt.sequence, None, 0)
        self.strategy.started(attempt)
        item = self._in_flight.add(prompt, attempt, _GROUP)
        self._in_flight.asked(item)
        item.start_version = 0
        self._stale.check(0)
        self._items.append(item)

    def end_oldest(self) -> None:
        item = self._items.popleft()
        self._in_flight.remove(item)
        self._stale.left(item, is_cancelled=False)


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
