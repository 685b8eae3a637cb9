"""Write a line for every ended group (`<run_dir>/groups.jsonl`), which simulations use.

The log also feeds the sample archive, if there is one, and `SampleDumps` writes the rows of
`trainer.rollout_data_dir` and `validation_data_dir`. A file that cannot be written never stops a
run: the service logs a warning, and lines are lost until the file is writable again. A killed
process loses the lines of its last `_LINGER_S` and of unfinished writes. The next process appends
to the same file with times of its own clock: a line names the process that wrote it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from services.reward.group_table import EndCause, EventKind, Group, GroupEnding, GroupEvent
from services.reward.records.episode_counts import (
    EnvironmentNames,
    calls_of,
    seconds_of,
)
from sluice.algorithm.groups.filter import is_right
from sluice.concurrency.threads import BoundedWriter, WriteError
from sluice.config.schema.trainer import TrainerConfig
from sluice.telemetry.samples import (
    DumpedSample,
    SampleArchive,
    SampledGroup,
    sampled_group,
    transcript,
    write_dump,
)
from sluice.types import GradedGroup, Outcome, Prompt, Rollout, RolloutGroup, Scored
from sluice.whole_file import append_lines

logger = logging.getLogger(__name__)

LAST_S = 5.0
_LINGER_S = 0.2
_MAX_LINES, _LINES_AT_ONCE, _SAMPLES_AT_ONCE = 100_000, 1000, 100
MAX_WAITING_BYTES = 128 << 20
"""Most bytes of text that wait for the archive, unless a batch needs more."""
_REMEDY = "free the disk or the folder"
_ID_LENGTH = 8  # distinguishes the few processes that write a file; each line holds it


class EpisodeLine(msgspec.Struct, frozen=True):
    """A sample with an environment, within a line of the log."""

    turns: int
    roots: int
    read: int
    end: str | None
    calls: dict[str, int]
    seconds: dict[str, float]


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """A group as a line of the log; docs/sampling.md explains the fields."""

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
    environment: str | msgspec.UnsetType = msgspec.UNSET
    source: str | msgspec.UnsetType = msgspec.UNSET
    episodes: list[EpisodeLine] | msgspec.UnsetType = msgspec.UNSET


class GroupLog:
    """An observer that writes a line for each group that ended.

    A batch ends all its groups at once, before any can be written, so the queue of samples is
    bounded by bytes of text; `waiting_bytes` makes it large enough for a batch.

    Args:
        path: the file to append to; ``None`` writes no lines.
        samples_per_group: n.
        samples: the archive of groups with their texts, if any.
        max_chars: most characters of each prompt and response in the archive.
        max_bytes: most bytes of text that wait for the archive.
        samples_of_source: n of each source, if there are several.
    """

    def __init__(
        self,
        path: Path | None,
        samples_per_group: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        samples: SampleArchive | None = None,
        max_chars: int = 1,
        max_bytes: int = MAX_WAITING_BYTES,
        environments: EnvironmentNames = EnvironmentNames(),  # noqa: B008  it is frozen
        samples_of_source: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._samples_of_source = samples_of_source
        self._samples_per_group, self._clock, self._start = samples_per_group, clock, clock()
        self._max_chars, self._names = max_chars, environments
        self._instance_id = uuid.uuid4().hex[:_ID_LENGTH]
        self._lines: BoundedWriter[GroupLine] | None = None
        if path is not None:
            self._lines = BoundedWriter(
                "groups",
                str(path),
                partial(_append, path),
                max_waiting=_MAX_LINES,
                batch=_LINES_AT_ONCE,
                interval_s=_LINGER_S,
            )
        self._parts_failed: frozenset[str] = frozenset()
        self._samples: BoundedWriter[SampledGroup] | None = None
        if samples is not None:
            self._samples = BoundedWriter(
                "samples of groups",
                "their archive (a lower sluice.dashboard.sample_chars makes them smaller)",
                partial(_archive, samples),
                max_waiting=max_bytes,
                batch=_SAMPLES_AT_ONCE,
                interval_s=_LINGER_S,
                size=_text_bytes,
            )

    def observe(self, event: GroupEvent) -> None:
        """Log an ended group, except prompts that never started or are too long. A group that
        cannot be logged loses its line and does not stop the run."""
        group, ending = event.group, event.group.ending
        if event.kind is not EventKind.ENDED or group.version is None or ending is None:
            return
        if ending.cause is EndCause.OVERLONG:
            return
        if self._lines is not None:
            with self._log_errors("line", group):
                self._lines.put(self._line(group, group.version, ending))
        if self._samples is not None:
            with self._log_errors("samples", group):
                self._samples.put(self._sampled_group(group, group.version, ending))

    @contextmanager
    def _log_errors(self, part: str, group: Group) -> Iterator[None]:
        """Turn an error of the block into a warning; only the first of a kind has a traceback."""
        try:
            yield
        except Exception:
            is_first, self._parts_failed = (
                part not in self._parts_failed,
                self._parts_failed | {part},
            )
            logger.warning("group %s: its %s not logged", group.prompt_id, part, exc_info=is_first)

    def _sampled_group(self, group: Group, version: int, ending: GroupEnding) -> SampledGroup:
        """Return the group's texts without tokens, logprobs and images, which need much memory."""
        sampled = sampled_group(
            group.prompt,
            ending.end,
            group.graded,
            version=version,
            step=ending.step,
            ended_at=time.time(),
            replicas=list(group.progress.replicas),
            max_chars=self._max_chars,
        )
        return msgspec.structs.replace(sampled, environment=self._names.of(group.prompt) or "")

    def close(self) -> None:
        """Write the waiting lines; a hanging disk loses those not written within `LAST_S`."""
        for writer in (self._lines, self._samples):
            if writer is not None:
                writer.close(LAST_S / 2)

    def _line(self, group: Group, version: int, ending: GroupEnding) -> GroupLine:
        graded, generated_s = group.graded, group.generated_s
        environment = self._names.of(group.prompt)
        scored = graded.scored if graded else ()
        has_tokens = graded is not None and graded.group.num_response_tokens > 0
        num_samples = self._samples_of_source.get(group.prompt.source, self._samples_per_group)
        is_staged = group.admitted_as.first_samples < num_samples
        return GroupLine(
            prompt_id=group.prompt_id,
            key=group.attempt.key,
            end=ending.end.value,
            right=sum(is_right(scored_sample) is True for scored_sample in scored),
            scored=len(scored),
            tokens=[rollout.num_tokens for rollout in graded.group.rollouts] if graded else [],
            version=version,
            oldest_version=graded.oldest_version if graded and has_tokens else None,
            started_s=self._since_start(group.started_s),
            generated_s=None if generated_s is None else self._since_start(generated_s),
            ended_s=self._since_start(self._clock()),
            replicas=list(group.progress.replicas),
            probes=group.admitted_as.first_samples if is_staged else 0,
            probability=group.attempt.probability,
            step=ending.step,
            instance_id=self._instance_id,
            environment=environment or msgspec.UNSET,
            source=group.prompt.source or msgspec.UNSET,
            episodes=_episode_lines(graded) if graded and environment else msgspec.UNSET,
        )

    def _since_start(self, at_s: float) -> float:
        return round(at_s - self._start, 4)


def waiting_bytes(samples_per_batch: int, max_chars: int) -> int:
    """Return how many bytes of text may wait for the archive: a batch, whose groups end at once, at
    two bytes per character."""
    return max(MAX_WAITING_BYTES, 2 * samples_per_batch * max_chars)


def _episode_lines(graded: GradedGroup) -> list[EpisodeLine]:
    return [
        EpisodeLine(
            len(rollout.turns),
            rollout.num_roots,
            rollout.num_context_tokens,
            None if rollout.end is None else rollout.end.value,
            dict(Counter(call.name for turn in rollout.turns for call in calls_of(turn))),
            seconds_of(rollout),
        )
        for rollout in graded.group.rollouts
    ]


def _append(path: Path, lines: Sequence[GroupLine]) -> None:
    text = b"".join(line + b"\n" for line in _encoded(lines, "line"))
    try:
        append_lines(path, text)
    except OSError as error:
        raise WriteError(f"{error}; {_REMEDY}") from error


def _archive(archive: SampleArchive, groups: Sequence[SampledGroup]) -> None:
    try:
        archive.append(_encoded(groups, "samples"))
    except OSError as error:
        raise WriteError(f"{error}; {_REMEDY}") from error


def _encoded(groups: Iterable[GroupLine | SampledGroup], part: str) -> Iterator[bytes]:
    """Encode each group separately, so that a value that JSON cannot hold loses only its group."""
    for group in groups:
        try:
            yield msgspec.json.encode(group)
        except (ValueError, TypeError, msgspec.MsgspecError) as error:  # text that is not Unicode
            logger.warning("group %s: its %s not logged: %s", group.prompt_id, part, error)


def _text_bytes(group: SampledGroup) -> int:
    texts = [group.prompt, group.ground_truth]
    for response in group.responses:
        texts += (response.text, response.failure)
        texts += (text for turn in response.turns for text in (turn.text, turn.read))
    return sum(map(sys.getsizeof, texts))


class SampleDumps:
    """Writes readable responses to ``<folder>/<step>.jsonl``, a row per graded response.

    A folder that cannot be written never stops a run: it logs one warning and loses the files.

    Args:
        training: folder of trained batches; ``None`` writes none.
        validation: folder of validations; ``None`` writes none.
    """

    def __init__(self, training: Path | None, validation: Path | None) -> None:
        self._training, self._validation = training, validation
        self._broken: set[Path] = set()

    async def write_trained(self, groups: Sequence[GradedGroup], step: int) -> None:
        """Write the batch of `step`, even if the caller is cancelled meanwhile."""
        if self._training is not None and groups:
            samples = [
                sample
                for graded in groups
                for sample in _samples(graded.group.prompt, graded.group.rollouts, graded.outcomes)
            ]
            await asyncio.shield(self._write(self._training, samples, step))

    def validation_rows(
        self, group: RolloutGroup, outcomes: Sequence[Outcome]
    ) -> tuple[DumpedSample, ...]:
        """Return a group's rows for `write_validated`; empty if validations are not written."""
        if self._validation is None:
            return ()
        return tuple(_samples(group.prompt, group.rollouts, outcomes))

    async def write_validated(self, samples: list[DumpedSample], step: int) -> None:
        """Write a validation of the version after `step`, replacing an earlier one."""
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
    """Return the configured dumps."""
    folders = (trainer.rollout_data_dir, trainer.validation_data_dir)
    return SampleDumps(*(None if folder is None else Path(folder) for folder in folders))


def _samples(
    prompt: Prompt, rollouts: Sequence[Rollout], outcomes: Sequence[Outcome]
) -> list[DumpedSample]:
    """Return the rows of the graded responses."""
    return [
        DumpedSample(
            input="\n".join(message.content for message in prompt.messages),
            output=transcript(rollout),
            gts=prompt.truth,
            score=outcome.score,
            extras={
                **outcome.metrics,
                **({} if outcome.prediction is None else {"pred": outcome.prediction}),
                "reward": outcome.reward,
                "uid": prompt.prompt_id,
            },
        )
        for rollout, outcome in zip(rollouts, outcomes, strict=True)
        if isinstance(outcome, Scored)
    ]
