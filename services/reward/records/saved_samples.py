"""Save the samples received so far, so that a restarted reward service continues from them.

Consumes: the requests under way and those that came home, at every interval. Waits for: the next
interval. Produces: news of their samples in the ledger, whose writer brings them to the disk;
groups beyond the bound are left out, the youngest first. What ended in between was of no use and is
never written.
On failure: of the disk, as for the whole ledger. On shutdown: what came since the last time is not
saved, as after a kill.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from services.reward.generation.request import ReceivedSamples, request_digest
from services.reward.generation.stream import CollectedGroup
from services.reward.ledger.content import SamplePart, SampleParts
from services.reward.ledger.ledger import PromptLedger
from sluice.algorithm.growing_sample import GrowingSample
from sluice.types import Prompt, Rollout, SamplingParams

MIB = 1 << 20
TOKEN_BYTES = 4


@dataclass(slots=True)
class _SavedState:
    """What the ledger knows of one request: samples that grow, and those that are whole."""

    digest: bytes
    growing: dict[int, tuple[GrowingSample, int]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)


class SampleSaver:
    """Between the groups under way and the ledger.

    Args:
        ledger: where samples are saved.
        under_way: the requests that are to be saved, the oldest first.
        interval_s: seconds between two savings; ``None``: nothing is saved.
        max_bytes: of all samples that are saved.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        under_way: Callable[[], tuple[CollectedGroup, ...]],
        *,
        interval_s: float | None,
        max_bytes: int,
    ) -> None:
        self._ledger, self._under_way = ledger, under_way
        self._interval_s, self._max_bytes = interval_s, max_bytes
        self._home: deque[CollectedGroup] = deque()
        self._forgotten: set[str] = set()  # prompt ids, since the saving under way began
        self._era = 0  # trainers so far
        self.num_saved_tokens = 0  # since the start
        self._saved: WeakKeyDictionary[CollectedGroup, _SavedState] = WeakKeyDictionary()

    @property
    def is_on(self) -> bool:
        """Whether anything is saved."""
        return self._interval_s is not None and self._ledger.saved_bytes is not None

    def received(self, prompt: Prompt, sampling: SamplingParams) -> ReceivedSamples | None:
        """What an earlier service had of a prompt's samples, if they are drawn as they were."""
        received = self._ledger.received(prompt.prompt_id)
        if received is None:
            return None
        if received.digest == request_digest(prompt, sampling):
            return received
        self.forget(prompt.prompt_id)
        return None

    def forget(self, prompt_id: str) -> None:
        """A prompt's samples so far are of no use; those of groups to come are told whole."""
        self._forgotten.add(prompt_id)
        self._home = deque(group for group in self._home if _prompt_id(group) != prompt_id)
        for group in [group for group in self._saved if _prompt_id(group) == prompt_id]:
            del self._saved[group]
        self._ledger.forget_samples(prompt_id)

    def opened(self, collected: CollectedGroup) -> None:
        """A request begins: the ledger has what it took up of an earlier service's samples."""
        request = collected.request
        if self.is_on and request.received is not None:
            reported = _SavedState(request.received.digest)
            self._saved[collected] = _after(collected, reported)

    def request_ended(self, collected: CollectedGroup) -> None:
        """A request has ended; what it brought is saved next time, if its prompt is pending."""
        if self.is_on:
            self._home.append(collected)

    def change_trainer(self, version: int | None) -> None:
        """Another trainer begins at `version`, on whose way all tokens were drawn that an earlier
        service received; ``None``: samples are of no use to it. No request is under way."""
        self._era += 1
        self._home.clear()
        self._saved.clear()
        self._ledger.change_trainer(version)

    async def run(self) -> None:
        """Save at every interval until cancelled."""
        if not self.is_on:
            return
        assert self._interval_s is not None
        while True:
            await asyncio.sleep(self._interval_s)
            await self.save()

    async def save(self) -> None:
        """Save what is there now; others run between two groups."""
        era = self._era
        self._forgotten.clear()
        for collected in (*self._home, *self._under_way()):
            if self._era != era:
                return  # what is left is of another trainer's policy
            if self._home and collected is self._home[0]:
                self._home.popleft()
            if _prompt_id(collected) not in self._forgotten:
                self._save(collected)
            await asyncio.sleep(0)

    def _save(self, collected: CollectedGroup) -> None:
        request, prompt_token_ids = collected.request, collected.prompt_token_ids
        prompt_id = request.prompt.prompt_id
        if prompt_token_ids is None or self._ledger.prompt(prompt_id) is not request.prompt:
            return
        reported = self._saved.get(collected)
        if reported is None:
            reported = _SavedState(request_digest(request.prompt, request.sampling))
        parts = tuple(_news(collected, reported))
        size = sum(len(part.token_ids) + len(part.behavior_logprobs) for part in parts)
        if parts and (self._ledger.saved_bytes or 0) + size <= self._max_bytes:
            self._ledger.save_samples(
                prompt_id, SampleParts.of(reported.digest, prompt_token_ids, parts)
            )
            self._saved[collected] = _after(collected, reported)
            self.num_saved_tokens += sum(len(part.token_ids) for part in parts) // TOKEN_BYTES


def _prompt_id(collected: CollectedGroup) -> str:
    return collected.request.prompt.prompt_id


def _news(collected: CollectedGroup, reported: _SavedState) -> Iterator[SamplePart]:
    for index, rollout in collected.finished.items():
        if index not in reported.whole:
            yield SamplePart.of(rollout, _known_of_whole(rollout, reported))
    for index, sample in collected.growing.items():
        before, known = reported.growing.get(index, (None, 0))
        start = known if before is sample else 0
        if sample.num_tokens > start:
            yield SamplePart.of(sample.rollout(index), start)


def _known_of_whole(rollout: Rollout, reported: _SavedState) -> int:
    """How many tokens of a sample that ended the ledger has; 0 if it has others."""
    before, known = reported.growing.get(rollout.sample_index, (None, 0))
    if before is None or known > rollout.num_tokens:
        return 0
    is_same = np.array_equal(before.token_ids()[:known], rollout.token_ids[:known])
    has_same_logprobs = np.array_equal(before.logprobs()[:known], rollout.behavior_logprobs[:known])
    return known if is_same and has_same_logprobs else 0


def _after(collected: CollectedGroup, reported: _SavedState) -> _SavedState:
    growing = {index: (s, s.num_tokens) for index, s in collected.growing.items()}
    return _SavedState(reported.digest, growing, set(collected.finished))
