"""A line for every group that ended (`<run_dir>/groups.jsonl`): what a simulation learns from.

Groups go on from here to the archive of samples, where one is kept. A file that cannot be written
never stops a run: it is told once, and nothing is lost but the log. A process that is killed loses
the lines of its last moment, `_LINGER_S` and what the disk takes. The next process appends to the
same file, with times of its own: a line names the process that wrote it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.reward.daemon_thread import in_daemon_thread
from services.reward.ended_groups import EndedGroups
from services.reward.generation_trace import GroupTrace
from sluice.algorithm.group_filter import is_right
from sluice.algorithm.sampling.visit import Attempt
from sluice.types import GradedGroup, Prompt, PromptEnd

logger = logging.getLogger(__name__)

LAST_S = 5.0
_LINGER_S = 0.2
_THREAD = "group log"
_ID_LENGTH = 8  # of a few starts in a file; it stands in each line


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as a line of the log.

    Args:
        prompt_id: its prompt.
        key: the same for the same prompt drawn again (`prompt_key`).
        end: how it ended, a `PromptEnd`.
        right: graded samples that were right.
        scored: graded samples.
        tokens: response lengths in the order of samples; of what was graded, scored or not.
        version: policy version announced when it started.
        oldest_version: oldest version that drew a token; null if nothing was graded.
        started_s: when it started, seconds since the service's start.
        generated_s: when its last sample came; null if it never did.
        ended_s: when it ended: a trained group when its batch was acknowledged.
        replicas: who generated it, in the order first asked.
        probes: samples that were drawn first, to decide about the rest; 0: all were drawn at once.
        probability: with which it was drawn, given what was known of its prompt.
        step: that trained it; null for others.
        incarnation: names the start of the service that its times are counted from.
    """

    prompt_id: str
    key: str
    end: str
    right: int
    scored: int
    tokens: list[int]
    version: int
    oldest_version: int | None
    started_s: float
    generated_s: float | None
    ended_s: float
    replicas: list[str]
    probes: int
    probability: float
    step: int | None = None
    incarnation: str


@dataclass(slots=True)
class _Open:
    attempt: Attempt
    probes: int
    version: int
    started_s: float
    generated_s: float | None = None


class GroupLog:
    """Follows groups from start to end and writes a line for each.

    Args:
        path: the file lines are appended to; ``None``: nothing is written.
        clock: seconds, monotonic.
        samples: gets the groups with their texts; ``None``: nobody does.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float] = time.monotonic,
        samples: EndedGroups | None = None,
    ) -> None:
        self._path, self._clock, self._start = path, clock, clock()
        self._samples, self._instance_id = samples, uuid.uuid4().hex[:_ID_LENGTH]
        self._open: dict[str, _Open] = {}
        self._lines: deque[GroupLine] = deque()
        self._has_lines = asyncio.Event()
        self._write_lock = threading.Lock()

    def started(self, prompt: Prompt, attempt: Attempt, *, probes: int, version: int) -> None:
        """A group starts."""
        if self._path is not None or self._samples is not None:
            self._open[prompt.prompt_id] = _Open(attempt, probes, version, self._now())

    def continued(self, prompt: Prompt, attempt: Attempt) -> None:
        """A group's first samples were not its last."""
        if (open_group := self._open.get(prompt.prompt_id)) is not None:
            open_group.attempt = attempt

    def generated(self, prompt: Prompt) -> None:
        """Samples of a group have come."""
        if (open_group := self._open.get(prompt.prompt_id)) is not None:
            open_group.generated_s = self._now()

    def restarted(self, prompt: Prompt) -> None:
        """A group is forgotten: its prompt waits again."""
        self._open.pop(prompt.prompt_id, None)

    def ended(
        self,
        prompt: Prompt,
        end: PromptEnd,
        graded: GradedGroup | None,
        trace: GroupTrace,
        *,
        step: int | None = None,
    ) -> None:
        """A group ends; a prompt that never had one leaves no line."""
        open_group = self._open.pop(prompt.prompt_id, None)
        if open_group is None:
            return
        if self._samples is not None:
            version, replicas = open_group.version, trace.replicas
            self._samples.add(prompt, end, graded, version=version, step=step, replicas=replicas)
        scored = graded.scored if graded else ()
        rollouts = graded.group.rollouts if graded else ()
        has_tokens = graded is not None and graded.group.num_response_tokens > 0
        self._lines.append(
            GroupLine(
                prompt_id=prompt.prompt_id,
                key=open_group.attempt.key,
                end=end.value,
                right=sum(is_right(one) is True for one in scored),
                scored=len(scored),
                tokens=[rollout.num_tokens for rollout in rollouts],
                version=open_group.version,
                oldest_version=graded.oldest_version if graded and has_tokens else None,
                started_s=open_group.started_s,
                generated_s=open_group.generated_s,
                ended_s=self._now(),
                replicas=list(trace.replicas),
                probes=open_group.probes,
                probability=open_group.attempt.probability,
                step=step,
                incarnation=self._instance_id,
            )
        )
        self._has_lines.set()

    async def run(self) -> None:
        """Write lines, off the event loop, until cancelled; the last ones before it ends.

        A disk that hangs then costs what it does not take within `LAST_S`, not the end.
        """
        try:
            while True:
                await self._has_lines.wait()
                # Groups end by the hundred a second; a thread for each costs more than its line.
                await asyncio.sleep(_LINGER_S)
                self._has_lines.clear()
                await in_daemon_thread(self._write, _THREAD)
        finally:
            await self._write_last()

    async def _write_last(self) -> None:
        last = in_daemon_thread(self._write, _THREAD)
        done, _ = await asyncio.wait({last}, timeout=LAST_S)
        if done:
            last.result()
            return
        last.cancel()
        num_lines = len(self._lines)
        self._lines.clear()
        num_samples = self._samples.drop() if self._samples else 0
        logger.warning(
            "the disk did not take the last groups within %g s: %d lines and %d samples are lost, "
            "besides what was being written; free the disk or the folder",
            LAST_S,
            num_lines,
            num_samples,
        )

    def _now(self) -> float:
        return round(self._clock() - self._start, 4)

    def _write(self) -> None:
        """Append what is there; lines leave the queue only in here, so none is lost on the way."""
        with self._write_lock:
            text = bytearray()
            while self._lines:
                text += msgspec.json.encode(self._lines.popleft()) + b"\n"
            if self._path is not None and text:
                self._append(self._path, text)
        if self._samples is not None:
            self._samples.write()

    def _append(self, path: Path, text: bytearray) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(text)
        except OSError as error:
            self._path = None
            logger.warning("groups are no longer logged: %s; free the disk or the folder", error)
