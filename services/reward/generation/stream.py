"""Collect the samples of one request; end its stream if it stalls or reaches a limit; log streams
that ended early."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from services.reward.generation.request import (
    PHASE,
    GenerateEvent,
    GroupRequest,
    SampleCallback,
)
from sluice.algorithm.groups.stragglers import StragglerRules, StreamPace
from sluice.algorithm.growing_sample import GrowingSample
from sluice.algorithm.routing import RoutedReplica
from sluice.errors import PeerError
from sluice.types import FinishReason, Rollout, RolloutGroup, TokenIds

logger = logging.getLogger(__name__)

GATHER_S = 1.0
"""Streams of a replica that end within these seconds share one line in the log."""
LATE_S = 10.0
"""Data that is read this many seconds late is logged."""
AGAIN_S = 1.0
"""Seconds until a wait for unread data that could not begin is tried again."""


@dataclass(slots=True, eq=False)
class CollectedSamples:
    """The samples of one request so far; their tokens may come from several replicas.

    It also keeps the group's `GroupProgress` up to date.

    Attributes:
        on_sample: called with each sample that has finished.
        was_moved: the request was moved away from a slow replica.
        prompt_token_ids: what the replica read, [tokens]; ``None`` before a replica accepts it.
        continued_text: what the prompt adds to the turn that it continues.
        replica: the last replica that got the request.
        queued_s: seconds spent without a replica.
        rollouts: the samples that have ended, by their index.
    """

    request: GroupRequest
    on_sample: SampleCallback | None = None
    was_moved: bool = False
    prompt_token_ids: TokenIds | None = None
    continued_text: str = ""
    replica: str = ""
    queued_s: float = 0.0
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    _growing: dict[int, GrowingSample] = field(default_factory=dict)
    _requested: set[int] = field(default_factory=set)
    _is_accepted: bool = False  # accepted by the replica of the present stream
    _part: object = field(default_factory=object)  # its key in `GroupProgress`

    def note_version(self, *, or_version: int | None = None) -> None:
        """Report the oldest version among its tokens and `or_version` to the group's progress."""
        version = self.oldest_version(or_version=or_version)
        self.request.progress.note_version(self._part, version)

    @property
    def missing(self) -> tuple[int, ...]:
        """The indexes of samples that have not ended."""
        return tuple(i for i in self.request.sample_indexes if i not in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Response tokens held, unfinished samples included."""
        num_ended = sum(rollout.num_tokens for rollout in self.rollouts.values())
        return num_ended + sum(sample.num_tokens for sample in self._growing.values())

    def oldest_version(self, *, or_version: int | None = None) -> int | None:
        """Return the oldest version among its tokens and `or_version`; ``None`` without either."""
        samples: list[Rollout | GrowingSample] = [*self.rollouts.values(), *self._growing.values()]
        versions = [span.version for sample in samples for span in sample.version_spans]
        if or_version is not None:
            versions.append(or_version)
        return min(versions, default=None)

    @property
    def is_first_turn(self) -> bool:
        """Whether the request is for the first turn of its samples."""
        return self.request.turn is None or self.request.turn.number == 0

    def note_requested(self, replica: str) -> None:
        """Note that a replica gets a request for the samples that are missing."""
        progress, missing = self.request.progress, set(self.missing)
        self.replica = replica
        if replica not in progress.replicas:
            progress.replicas.append(replica)
        if self.is_first_turn:
            progress.num_requested += len(missing - self._requested)
        self._requested |= missing
        self._is_accepted = False

    def take(self, event: GenerateEvent, now_s: float) -> dict[int, int]:
        """Store what the replica sent.

        Args:
            event: one message.
            now_s: seconds of the event loop's clock.

        Returns:
            the new tokens, by sample index.

        Raises:
            PeerError: the event does not fit the request.
        """
        if event.started is not None:
            self._note_accepted(*event.started, now_s)
            self.continued_text = event.continued_text
        new_tokens = self._count_received(event)
        if (event.rollouts or event.deltas) and not self._is_accepted:
            raise self._defect("it sent samples before the prompt's tokens")
        for delta in event.deltas:
            self._check_requested(delta.sample_index)
            sample = self._growing.setdefault(delta.sample_index, GrowingSample())
            sample.append(delta.token_ids, delta.behavior_logprobs, delta.version)
            self.request.progress.num_tokens += int(delta.token_ids.size)
        for rollout in event.rollouts:
            self._end(rollout)
        return new_tokens

    def _note_accepted(self, prompt_token_ids: TokenIds, version: int, now_s: float) -> None:
        """Note that the replica accepted the request; raise `PeerError` if its prompt does not
        continue the earlier turns or differs from the prompt that another replica read."""
        turn, known_prompt = self.request.turn, self.prompt_token_ids
        size = prompt_token_ids.size
        if turn is not None:
            earlier = turn.earlier
            if earlier is not None and not np.array_equal(
                prompt_token_ids[: earlier.size], earlier
            ):
                raise self._defect(
                    f"its prompt of {size} tokens does not begin with the {earlier.size} tokens of "
                    "the turns before"
                )
            if known_prompt is not None and not np.array_equal(prompt_token_ids, known_prompt):
                raise self._defect(
                    f"its prompt of {size} tokens is not the one of {known_prompt.size} tokens "
                    "that another replica read"
                )
        self._is_accepted = True
        self.prompt_token_ids = prompt_token_ids
        self.request.progress.note_started(prompt_token_ids if self.is_first_turn else None, now_s)
        self.note_version(or_version=version)

    def _count_received(self, event: GenerateEvent) -> dict[int, int]:
        """Count the tokens that are new, used or not."""
        new_tokens: dict[int, int] = {}
        for delta in event.deltas:
            size = int(delta.token_ids.size)
            new_tokens[delta.sample_index] = new_tokens.get(delta.sample_index, 0) + size
        for rollout in event.rollouts:  # a complete sample repeats its earlier tokens
            index = rollout.sample_index
            held_sample = self.rollouts.get(index) or self._growing.get(index)
            beyond = rollout.num_tokens - (held_sample.num_tokens if held_sample else 0)
            # One event may hold a delta and the complete sample, which counts the delta again.
            new_tokens[index] = max(new_tokens.get(index, 0), beyond)
        self.request.progress.num_received += sum(new_tokens.values())
        return new_tokens

    def _end(self, rollout: Rollout) -> None:
        """Store a sample that the stream has ended; an aborted one may be continued."""
        index, progress = rollout.sample_index, self.request.progress
        self._check_requested(index)
        growing = self._growing.pop(index, None)
        num_known = growing.num_tokens if growing else 0
        if growing and not np.array_equal(rollout.token_ids[:num_known], growing.token_ids()):
            # One of the two is wrong, but not known which: the sample restarts.
            progress.num_tokens -= num_known
            progress.num_thrown_away += max(num_known, rollout.num_tokens)
            raise self._defect(
                f"sample {index} came with {rollout.num_tokens} tokens that do not continue the "
                f"{num_known} that came before"
            )
        progress.num_tokens += rollout.num_tokens - num_known
        if rollout.finish_reason is FinishReason.ABORTED:
            self._growing[index] = GrowingSample()
            self._growing[index].adopt(rollout)
            return
        self.rollouts[index] = rollout
        if self.request.turn is None:  # else more turns may follow
            progress.has_finished_samples = True
        if self.on_sample is not None:
            self.on_sample(rollout)

    def _check_requested(self, sample_index: int) -> None:
        if sample_index in self.rollouts or sample_index not in self.request.sample_indexes:
            raise self._defect(f"sample {sample_index} was not asked for")

    def _defect(self, detail: str) -> PeerError:
        return PeerError(self.replica, PHASE, detail)

    def partials(self) -> Sequence[Rollout]:
        """Return the unfinished samples that have tokens, to be continued.

        Samples with tokens of versions that the request excludes restart: drop their tokens here.
        """
        requirement = self.request.requirement(0)
        for index, sample in list(self._growing.items()):
            if not all(requirement.accepts(span.version) for span in sample.version_spans):
                del self._growing[index]
                self.request.progress.num_tokens -= sample.num_tokens
                self.request.progress.num_thrown_away += sample.num_tokens
        return [s.rollout(index) for index, s in sorted(self._growing.items()) if s.num_tokens]

    def end_unfinished(self) -> None:
        """End each missing sample with the tokens received so far."""
        for index in self.missing:
            self.rollouts[index] = self._growing.pop(index, GrowingSample()).rollout(index)

    def state(self) -> str:
        """Describe the progress, for the log."""
        num_finished = sum(
            rollout.finish_reason is not FinishReason.ABORTED for rollout in self.rollouts.values()
        )
        oldest = self.oldest_version()
        version = "no version" if oldest is None else f"version {oldest}"
        return (
            f"{self.num_tokens} tokens, {num_finished} of {len(self.request.sample_indexes)} "
            f"samples finished, {version}"
        )

    def group(self) -> RolloutGroup:
        """Return the samples in order of their index.

        Call it only after a replica has accepted the request and every sample has ended.
        """
        prompt_token_ids = self.request.progress.prompt_token_ids
        assert prompt_token_ids is not None
        rollouts = tuple(self.rollouts[i] for i in sorted(self.rollouts))
        return RolloutGroup(self.request.prompt, prompt_token_ids, rollouts)


class StreamEnd(StrEnum):
    """Why a stream ended without an error."""

    REPLICA_REMOVED = "removed"
    REPLICA_SWAPS = "about to leave the validated version"
    STALLED = "stalled"
    SLOW = "slow"
    GROUP_OVER = "group over"


class Backlog:
    """Data that replicas have sent and this process has not read; for use inside an event loop.

    Attributes:
        read_until: all data that arrived before this time is read; seconds of the event loop's
            clock.

    Args:
        call_after_backlog: calls back once all data received by now is read.
    """

    def __init__(self, call_after_backlog: Callable[[Callable[[], None]], None]) -> None:
        self.read_until = -math.inf
        self._call_after_backlog = call_after_backlog
        self._callbacks: list[Callable[[], None]] = []
        self._is_awaited = False

    def when_read(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all data received by now is read."""
        self._callbacks.append(callback)
        if not self._is_awaited:
            self._await()

    def _await(self) -> None:
        self._is_awaited, began = True, asyncio.get_running_loop().time()
        callbacks, self._callbacks = self._callbacks, []
        try:
            self._call_after_backlog(lambda: self._read(began, callbacks))
        except Exception as error:  # noqa: BLE001 - without an answer no stream would stall again
            logger.warning("cannot wait for unread data of replicas: %r; will retry", error)
            self._callbacks[:0] = callbacks
            asyncio.get_running_loop().call_later(AGAIN_S, self._await)

    def _read(self, began: float, callbacks: Sequence[Callable[[], None]]) -> None:
        self.read_until, self._is_awaited = began, False
        if (late_s := asyncio.get_running_loop().time() - began) >= LATE_S:
            logger.warning(
                "data from replicas is read %.0f s late: this process needs more CPU time", late_s
            )
        for callback in callbacks:
            callback()
        if self._callbacks and not self._is_awaited:
            self._await()


class StreamWatch:
    """Ends a stream that stalls, must leave its replica, or belongs to a group that is over.

    It has no task: each `reschedule` moves the deadline of the scope that reads the stream, and a
    timer calls it when the stream may have stalled.

    Args:
        scope: the scope that reads the stream.
        member: its replica.
        rules: when to give a stream up.
        backlog: knows which messages may be unread.
        request: the request of its group.
        sample_indexes: the samples requested.
        now_s: seconds of the event loop's clock.
    """

    def __init__(
        self,
        scope: asyncio.Timeout,
        member: RoutedReplica,
        rules: StragglerRules,
        backlog: Backlog,
        request: GroupRequest,
        sample_indexes: Collection[int],
        now_s: float,
    ) -> None:
        self._scope, self._rules, self._backlog, self._began_s = scope, rules, backlog, now_s
        self._next_check: asyncio.TimerHandle | None = None
        self._is_check_planned = self._is_closed = False
        self._progress, self._requirement = request.progress, request.requirement(0)
        self.member, self.pace = member, StreamPace(set(sample_indexes), now_s)
        self.reschedule()

    def close(self) -> None:
        """Stop the watch."""
        self._is_closed = True
        if self._next_check is not None:
            self._next_check.cancel()

    @property
    def must_move(self) -> StreamEnd | None:
        """Why the samples must continue on another replica; ``None`` if they may stay."""
        if self.member.removed:
            return StreamEnd.REPLICA_REMOVED
        # Training samples may span a weight swap; a validation's samples need one version.
        is_bounded = self._requirement.highest_version is not None
        if is_bounded and not self._requirement.takes(self.member.announced.offer):
            return StreamEnd.REPLICA_SWAPS
        return None

    def reschedule(self) -> None:
        """Set the deadline of the scope from the current pace, progress and replica."""
        if self._scope.expired():
            return
        is_stalled = self._rules.is_stalled(self.pace, self._backlog.read_until)
        if is_stalled or self.must_move is not None:
            self._scope.reschedule(self._began_s)  # a past deadline ends the stream at once
            return
        self._scope.reschedule(self._progress.over_at)
        at, loop = self._rules.stalled_at(self.pace), asyncio.get_running_loop()
        if at is None or self._is_check_planned:
            return
        # Look again when the stream may have stalled; if it may now, after reading what has
        # arrived.
        self._is_check_planned = True
        if at > loop.time():
            self._next_check = loop.call_at(at, self._check_stalled)
        else:
            self._backlog.when_read(self._check_stalled)

    def _check_stalled(self) -> None:
        self._is_check_planned = False
        if not self._is_closed:
            self.reschedule()

    def why_expired(self, now_s: float) -> StreamEnd:
        """Return why the scope ended the stream."""
        if (end := self.must_move) is not None:
            return end
        over_at = self._progress.over_at
        is_over = over_at is not None and now_s >= over_at
        return StreamEnd.GROUP_OVER if is_over else StreamEnd.STALLED

    def state(self, now_s: float) -> str:
        """Describe the progress, for the log."""
        pace = self.pace
        without = f", {sorted(pace.waiting)}" if pace.waiting else ""
        quietest = pace.quietest(now_s)
        silent = f", of these {quietest[0]} is silent for {quietest[1]:.1f} s" if quietest else ""
        return (
            f"nothing for {now_s - pace.last_progress:.1f} s, stream of "
            f"{now_s - self._began_s:.1f} s with {pace.num_tokens} tokens; "
            f"{len(pace.waiting)} samples without any{without}, "
            f"{len(pace.running)} running{silent}, {pace.num_finished} ended"
        )


class EndedStreams:
    """Streams that recently ended before their samples, by replica; for use inside an event loop.

    A replica that dies, hangs or swaps its weights ends the streams of all its groups at once. The
    log gets one line for all, a warning if they broke.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[str, bool], list[int]] = {}

    def note(self, replica: str, num_samples: int, why: str, *, broke: bool = True) -> None:
        """Count a stream that ended without `num_samples` samples; the line shows the first `why`.

        A stream that broke after its last sample does not count.
        """
        if not num_samples:
            return
        counts = self._samples.setdefault((replica, broke), [])
        counts.append(num_samples)
        if len(counts) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._notify, replica, broke, why)

    def _notify(self, replica: str, broke: bool, why: str) -> None:
        counts = self._samples.pop((replica, broke))
        logger.log(
            logging.WARNING if broke else logging.INFO,
            "replica %s: streams of %d groups %s, %d samples continue elsewhere; the first: %s",
            *(replica, len(counts), "broke" if broke else "moved", sum(counts), why),
        )
