"""Write a line for every group that ended (`<run_dir>/groups.jsonl`); simulations learn from it.

The log also feeds the archive of samples, where there is one. A file that cannot be written never
stops a run: the log has one warning, and only the lines are lost. A process that is killed loses
the lines of its last moment, `_LINGER_S` and what the disk takes. The next process appends to the
same file, with times of its own: a line names the process that wrote it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from services.reward.group import EndCause, Ending, EventKind, Group, GroupEvent
from sluice.algorithm.groups.filter import is_right
from sluice.config.schema.trainer import TrainerConfig
from sluice.telemetry.samples import (
    DumpedSample,
    SampleArchive,
    SampledGroup,
    sampled_group,
    write_dump,
)
from sluice.types import GradedGroup, Outcome, Prompt, Rollout, RolloutGroup, Scored

logger = logging.getLogger(__name__)

LAST_S = 5.0
_LINGER_S = 0.2
_THREAD = "group log"
_ID_LENGTH = 8  # of a few starts in a file; it stands in each line


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as a line of the log.

    Args:
        prompt_id: its prompt.
        key: the same for every attempt of a prompt (`prompt_key`).
        end: how it ended, a `PromptEnd`.
        right: graded samples that were right.
        scored: graded samples.
        tokens: response lengths in the order of samples; of what was graded, scored or not.
        version: policy version announced when it started.
        oldest_version: oldest version that sampled a token; null if nothing was graded.
        started_s: when it started, seconds since the service's start.
        generated_s: when its last sample came; null if it never did.
        ended_s: when it ended: a trained group when its batch was acknowledged.
        replicas: who generated it, in the order first asked.
        probes: samples generated first, to decide about the rest; 0: all were generated at once.
        probability: with which it started, given what was known of its prompt.
        step: that trained it; null for others.
        instance: names the start of the service that its times are counted from.
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
    instance_id: str


class GroupLog:
    """An observer that writes a line for each group that ended.

    Args:
        path: the file lines are appended to; ``None``: nothing is written.
        samples_per_group: n.
        clock: seconds, monotonic.
        samples: gets the groups with their texts; ``None``: nobody does.
    """

    def __init__(
        self,
        path: Path | None,
        samples_per_group: int = 0,
        clock: Callable[[], float] = time.monotonic,
        samples: EndedGroups | None = None,
    ) -> None:
        self._path = path
        self._samples_per_group = samples_per_group
        self._clock = clock
        self._start = clock()
        self._samples = samples
        self._instance_id = uuid.uuid4().hex[:_ID_LENGTH]
        self._lines: deque[GroupLine] = deque()
        self._has_lines = asyncio.Event()
        self._write_lock = threading.Lock()

    def observe(self, event: GroupEvent) -> None:
        """Log a group that ended; a prompt whose group never started, or that is too long, leaves
        no line."""
        group, ending = event.group, event.group.ending
        if event.kind is not EventKind.ENDED or group.version is None or ending is None:
            return
        if ending.cause is EndCause.OVERLONG:
            return
        if self._samples is not None:
            self._samples.add(group, ending)
        graded = group.graded
        scored = graded.scored if graded else ()
        rollouts = graded.group.rollouts if graded else ()
        has_tokens = graded is not None and graded.group.num_response_tokens > 0
        is_staged = group.admitted_as.first_samples < self._samples_per_group
        self._lines.append(
            GroupLine(
                prompt_id=group.prompt_id,
                key=group.attempt.key,
                end=ending.end.value,
                right=sum(is_right(one) is True for one in scored),
                scored=len(scored),
                tokens=[rollout.num_tokens for rollout in rollouts],
                version=group.version,
                oldest_version=graded.oldest_version if graded and has_tokens else None,
                started_s=self._since_start(group.started_s),
                generated_s=None
                if group.generated_s is None
                else self._since_start(group.generated_s),
                ended_s=self._since_start(self._clock()),
                replicas=list(group.tokens.replicas),
                probes=group.admitted_as.first_samples if is_staged else 0,
                probability=group.attempt.probability,
                step=ending.step,
                instance_id=self._instance_id,
            )
        )
        self._has_lines.set()

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._path is not None or self._samples is not None

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

    def _since_start(self, at_s: float) -> float:
        return round(at_s - self._start, 4)

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


# Ended groups with their texts, written to the run's archive for readers.
#
# Groups wait for the disk in a queue that is bounded in bytes: beyond the bound the oldest are left
# out, counted and logged. They are encoded and written off the event loop. Nothing that goes wrong
# here stops a run: the log has one warning, and only the archive is lost.


MOST_WAITING_BYTES = 128 << 20
_DEFECT = "samples are no longer kept: a defect of their archive"


class EndedGroups:
    """The archive of groups: takes them in the event loop and writes them in another thread.

    A batch ends all its groups at once, before any of them can be written: the bound is on bytes
    of text, which are those of the batch in memory unless they are shortened.

    Args:
        archive: where they go.
        most_chars: of each prompt and response.
        clock: seconds since 1970.
        most_bytes: of texts that wait; the newest group waits whatever its size.
    """

    def __init__(
        self,
        archive: SampleArchive,
        most_chars: int,
        clock: Callable[[], float] = time.time,
        *,
        most_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        self._archive, self._most_chars, self._clock = archive, most_chars, clock
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[SampledGroup, int]] = deque()
        self._num_bytes = self._num_left_out = 0
        self._queue_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._is_broken = False

    def add(self, group: Group, ending: Ending) -> None:
        """Take on a group that has ended; its tokens, log-probs and images are not held."""
        if self._is_broken:
            return
        try:
            sampled = sampled_group(
                group.prompt,
                ending.end,
                group.graded,
                version=group.version or 0,
                step=ending.step,
                ended_at=self._clock(),
                replicas=list(group.tokens.replicas),
                most_chars=self._most_chars,
            )
        except Exception:
            logger.exception(_DEFECT)
            self._give_up()
            return
        with self._queue_lock:
            self._enqueue(sampled)

    def write(self) -> None:
        """Write what waits; a second thread waits for the first."""
        with self._write_lock:
            if self._is_broken:
                return
            try:
                self._archive.append(self._lines())
            except OSError as error:
                self._give_up()
                logger.warning("samples are no longer kept: %s; free the disk or the folder", error)
            except Exception:
                logger.exception(_DEFECT)
                self._give_up()
            self._report_omitted()

    def drop(self) -> int:
        """Forget what waits; return how many groups those were, with the ones left out before."""
        with self._queue_lock:
            num = len(self._waiting) + self._num_left_out
            self._waiting.clear()
            self._num_bytes = self._num_left_out = 0
        return num

    def _give_up(self) -> None:
        self._is_broken = True
        self.drop()

    def _enqueue(self, group: SampledGroup) -> None:
        size = _text_bytes(group)
        self._waiting.append((group, size))
        self._num_bytes += size
        while self._num_bytes > self._most_bytes and len(self._waiting) > 1:
            self._num_bytes -= self._waiting.popleft()[1]
            self._num_left_out += 1

    def _next(self) -> SampledGroup | None:
        with self._queue_lock:
            if not self._waiting:
                return None
            group, size = self._waiting.popleft()
            self._num_bytes -= size
            return group

    def _lines(self) -> Iterator[bytes]:
        while (group := self._next()) is not None:
            try:
                line = msgspec.json.encode(group)
            except (ValueError, TypeError, msgspec.MsgspecError) as error:  # as text not Unicode
                logger.warning("group %s is not kept among the samples: %s", group.prompt_id, error)
                continue
            yield line

    def _report_omitted(self) -> None:
        with self._queue_lock:
            num, self._num_left_out = self._num_left_out, 0
        if num:
            logger.warning(
                "%d groups are missing among the samples: more than %d MiB of texts waited for the "
                "disk; a lower sluice.dashboard.sample_chars makes them smaller",
                num,
                self._most_bytes >> 20,
            )


def _text_bytes(group: SampledGroup) -> int:
    texts = [group.prompt, group.ground_truth]
    for response in group.responses:
        texts += (response.text, response.failure)
    return sum(map(sys.getsizeof, texts))


# Responses written to files for reading (`trainer.rollout_data_dir`, `validation_data_dir`).
#
# A folder that cannot be written never stops a run: the log has one warning, and only the files are
# lost.


class SampleDumps:
    """``<folder>/<step>.jsonl``, a row a graded response.

    Args:
        training: gets trained batches; ``None``: they are not written.
        validation: gets validations.
    """

    def __init__(self, training: Path | None, validation: Path | None) -> None:
        self._training, self._validation = training, validation
        self._broken: set[Path] = set()

    async def trained(self, groups: Sequence[GradedGroup], step: int) -> None:
        """Write the batch of `step`."""
        if self._training is not None and groups:
            samples = [
                sample
                for graded in groups
                for sample in _samples(graded.group.prompt, graded.group.rollouts, graded.outcomes)
            ]
            await self._write(self._training, samples, step)

    def of_validation(
        self, group: RolloutGroup, outcomes: Sequence[Outcome]
    ) -> tuple[DumpedSample, ...]:
        """What `validated` is to be given of a group; nothing if validations are not written."""
        if self._validation is None:
            return ()
        return tuple(_samples(group.prompt, group.rollouts, outcomes))

    async def validated(self, samples: list[DumpedSample], step: int) -> None:
        """Write a validation of the version after `step`; a later one of it replaces it."""
        if self._validation is not None:
            await self._write(self._validation, samples, step)

    async def _write(self, folder: Path, samples: list[DumpedSample], step: int) -> None:
        try:
            await asyncio.to_thread(write_dump, folder, samples, step)
        except OSError as error:
            if folder not in self._broken:
                logger.warning("samples are not written: %s; free the disk or the folder", error)
            self._broken.add(folder)


def sample_dumps(trainer: TrainerConfig) -> SampleDumps:
    """As configured."""
    folders = (trainer.rollout_data_dir, trainer.validation_data_dir)
    return SampleDumps(*(None if folder is None else Path(folder) for folder in folders))


def _samples(
    prompt: Prompt, rollouts: Sequence[Rollout], outcomes: Sequence[Outcome]
) -> list[DumpedSample]:
    """The graded ones."""
    return [
        DumpedSample(
            input="\n".join(message.content for message in prompt.messages),
            output=rollout.text,
            gts=prompt.ground_truth,
            score=outcome.score,
            extras={**outcome.metrics, "reward": outcome.reward, "uid": prompt.prompt_id},
        )
        for rollout, outcome in zip(rollouts, outcomes, strict=True)
        if isinstance(outcome, Scored)
    ]


def in_daemon_thread(work: Callable[[], None], name: str) -> asyncio.Future[None]:
    """Begin work in a thread of its own.

    Args:
        name: of the thread.

    Returns:
        done when the work is; cancelling it does not end the thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def report(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - it belongs to who waits
            error = raised
        try:
            loop.call_soon_threadsafe(report, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
