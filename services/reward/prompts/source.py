"""Choose the next prompt: waiting prompts in order of issue, then the data set.

Waiting prompts come from clients, or start again. Data-set prompts are accepted in the data set's
order, a few ahead, and start in the order that `AdmissionOrder` gives them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from struct import Struct

from services.reward.group_table import GroupTable
from services.reward.prompts.dataset import IssuedRow, PromptStream
from sluice.algorithm.episode_rules import AGENT_NAME
from sluice.algorithm.sampling.admission import AdmissionOrder, FinishForecast
from sluice.types import DataProgress, Prompt, PromptOrigin

ROWS_PER_READ = 64
_KEY_BYTES = 16
_FRAME = Struct("<Q").pack
DATASET_ID_PREFIX, VALIDATION_ID_PREFIX = "data-", "validation-"
"""The prefixes of the ids of the run's own prompts."""


def prompt_key(prompt: Prompt) -> str:
    """Return the BLAKE2b digest of messages, ground truth and images: 16 bytes in hexadecimal."""
    digest = blake2b(digest_size=_KEY_BYTES)
    texts = [text for turn in prompt.messages for text in (turn.role, turn.content)]
    for text in (*texts, prompt.ground_truth):
        encoded = text.encode()
        digest.update(_FRAME(len(encoded)) + encoded)  # without the size, "ab", "c" = "a", "bc"
    for image in prompt.images:
        digest.update(blake2b(image, digest_size=_KEY_BYTES).digest())
    return digest.hexdigest()


class PromptSource:
    """Issues the prompts of a source.

    Args:
        groups: accepts the prompts read from the data set.
        open_stream: opens the data set at a progress; ``None``: all prompts come from clients.
        forecast: how long groups take.
        num_in_line: rows that compete for the next start; 1 keeps the data set's order.
        name: the source's name; empty in a run without `sluice.sources`.
        environment: the environment of rows that name none; ``None`` for the run's.

    Attributes:
        has_dataset: whether there is a data set.
        has_one_in_hand: an issued prompt counts as waiting until its admission is decided.
    """

    def __init__(
        self,
        groups: GroupTable,
        open_stream: Callable[[DataProgress], PromptStream] | None,
        forecast: FinishForecast,
        num_in_line: int,
        name: str,
        environment: str | None,
    ) -> None:
        self._name, self._environment = name, environment
        self._groups, self._open_stream = groups, open_stream
        self.has_dataset = open_stream is not None
        self._forecast, self._num_in_line = forecast, num_in_line
        self._waiting: list[tuple[int, Prompt]] = []
        self._order = AdmissionOrder()
        self._in_line: dict[int, Prompt] = {}  # by sequence
        self._stream: PromptStream | None = None
        self._issued: deque[IssuedRow] = deque()
        self._at_end = False
        self.has_one_in_hand = False

    @property
    def num_waiting(self) -> int:
        """Accepted prompts that wait to be issued, including the one in hand."""
        return len(self._waiting) + len(self._in_line) + self.has_one_in_hand

    @property
    def is_exhausted(self) -> bool:
        """Whether the data set has ended and no prompt waits."""
        return self._at_end and not self._issued and not self.num_waiting

    def start_data(self, progress: DataProgress) -> None:
        """Read from `progress` on; drop rows that were read ahead."""
        self._issued.clear()
        self._at_end = False
        self._stream = self._open_stream(progress) if self._open_stream else None

    def put(self, prompt: Prompt) -> None:
        """Queue an accepted prompt before any later one and before the data set.

        The order is that of issue: a prompt that starts again precedes all issued after it.
        """
        heappush(self._waiting, (prompt.sequence, prompt))

    def forget_data(self) -> None:
        """Drop the waiting data-set prompts, which `GroupTable` has forgotten."""
        self._waiting = [entry for entry in self._waiting if entry[1].origin is PromptOrigin.CLIENT]
        heapify(self._waiting)
        self._in_line.clear()
        self._order.clear()

    async def next_prompt(self, version: int, now_s: float) -> Prompt | None:
        """Return the next accepted prompt; ``None`` if there is none now.

        Args:
            version: the announced policy version.
            now_s: now, on the forecast's clock.

        Raises:
            DataError: the data set holds an unusable row.
        """
        while not self._waiting and len(self._in_line) < self._num_in_line:
            stream = self._stream
            if stream is not None and not self._issued and not self._at_end:
                await self._read_ahead(stream)
            if not self._issued:
                break
            prompt, expected = self._accept(self._issued.popleft()), 0.0
            if self._num_in_line > 1:
                expected = self._forecast.tokens(prompt_key(prompt))
            self._order.add(prompt.sequence, expected, version)
            self._in_line[prompt.sequence] = prompt
        if self._waiting:
            return heappop(self._waiting)[1]
        if not self._in_line:
            return None
        sequence = self._order.take(version, self._forecast.tokens_in_time(now_s))
        return self._in_line.pop(sequence)

    async def _read_ahead(self, stream: PromptStream) -> None:
        issued_rows = await asyncio.to_thread(stream.take, ROWS_PER_READ)
        if stream is self._stream:  # a restart may have replaced it meanwhile
            self._issued.extend(issued_rows)
            self._at_end = len(issued_rows) < ROWS_PER_READ

    def _accept(self, issued: IssuedRow) -> Prompt:
        prefix = f"{DATASET_ID_PREFIX}{self._name}-" if self._name else DATASET_ID_PREFIX
        prompt = issued.prompt(f"{prefix}{issued.position}", self._groups.ledger.next_sequence())
        if self._name:
            prompt = self._of_source(prompt)
        self._groups.accept(prompt)
        return prompt

    def _of_source(self, prompt: Prompt) -> Prompt:
        extra_info = prompt.extra_info
        if self._environment is not None:
            extra_info = {AGENT_NAME: self._environment, **extra_info}
        return replace(prompt, source=self._name, extra_info=extra_info)
