"""One episode: the policy and the environment take turns until one of them or a limit ends it.

Waits for: the environment, within the group's time; samples, by the dispatcher's rules; both within
the episode's time. On failure: an environment that fails ends only this sample, with a failure
instead of a score. However the episode ends, its environment is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from services.reward.episodes.drivers import (
    EpisodeDriver,
    EpisodeFailedError,
    abandon_episode,
)
from services.reward.episodes.leases import LeasedEpisode
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.request import (
    GroupFailedError,
    GroupOverError,
    GroupRequest,
    TurnRequest,
)
from services.reward.generation.stream import CollectedSamples
from services.reward.ledger.leases import CommittedTurn
from sluice.algorithm.episode_rules import (
    EpisodeCounts,
    EpisodeRules,
    Observation,
    TurnStart,
    answer_message,
    find_turn_start,
    num_before_new,
    truncate_tool_texts,
    turn_seed,
    with_new_ids,
)
from sluice.algorithm.growing_sample import GrowingSample
from sluice.errors import HistoryRewrittenError, SequenceTooLongError
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanName
from sluice.types import (
    Answer,
    ChatMessage,
    EpisodeEnd,
    Failed,
    FailureKind,
    FinishReason,
    Rollout,
    TokenIds,
    Tool,
    Turn,
)

logger = logging.getLogger(__name__)

QUEUE, MODEL, ENVIRONMENT = "queue", "model", "environment"
"""The parts of a turn's time."""
READ_TEXT = "plain"
"""How answers are parsed where the policy has no tools."""
MAX_TOOL_NAMES = 256
"""Each of these tools has a metric; calls of others count as calls of unknown tools."""
CONTINUES_NONE = (
    "a conversation continues none of the sample's answers; an agent that appends to its history, "
    "and offers the same tools with each request, avoids this"
)
TEMPLATE_REWRITES = (
    "the chat template rewrites history; one that leaves history as it was avoids this"
)
"""Why turns begin new roots."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredTurn:
    """A sampled turn.

    Args:
        prompt_token_ids: what the policy read, [tokens]; ``None``: no replica accepted it.
        queued_s: seconds spent without a replica.
        continued_text: the text that the prompt adds to the turn that it continues.
    """

    rollout: Rollout
    prompt_token_ids: TokenIds | None
    replica: str
    queued_s: float
    continued_text: str = ""

    @classmethod
    def of(
        cls, collected: CollectedSamples, sample_index: int, before_s: float = 0.0
    ) -> AnsweredTurn:
        """Return a sample of a request that was sent after `before_s` seconds of waiting."""
        return cls(
            collected.rollouts[sample_index],
            collected.prompt_token_ids,
            collected.replica,
            before_s + collected.queued_s,
            collected.continued_text,
        )


FirstTurn = Callable[[int, Sequence[ChatMessage], Sequence[Tool]], Awaitable[AnsweredTurn]]
"""Samples the first turn of a sample, perhaps together with others'."""


class EpisodeNotes:
    """What happens in the episodes of a run.

    Attributes:
        num_rewritten: later turns that began a new root.
        tool_names: the first `MAX_TOOL_NAMES` tools that environments have offered.
    """

    def __init__(self) -> None:
        self.num_rewritten = 0
        self.tool_names: set[str] = set()
        self._warned: set[str] = set()

    def note_tools(self, tools: Sequence[Tool]) -> None:
        """Note tools that an environment offers."""
        for tool in tools[: MAX_TOOL_NAMES - len(self.tool_names)]:
            self.tool_names.add(tool.name)

    def note_rewritten(self, reason: str, detail: str = "") -> None:
        """Note a later turn that continues no earlier one; warn of the first with a reason."""
        self.num_rewritten += 1
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning(
                "turns begin new roots, which are trained separately and read their history "
                "again: %s%s",
                reason,
                f" ({detail})" if detail else "",
            )


class Episode:
    """One sample of a group."""

    def __init__(
        self,
        sample_index: int,
        episode_id: str,
        request: GroupRequest,
        rules: EpisodeRules,
        driver: EpisodeDriver,
        dispatcher: GroupDispatcher,
        notes: EpisodeNotes,
    ) -> None:
        self._index, self._id = sample_index, episode_id
        self._request, self._rules = request, rules
        self._driver, self._dispatcher, self._notes = driver, dispatcher, notes
        self._counts = EpisodeCounts(rules)
        self._turns: list[Turn] = []
        self._added: list[tuple[ChatMessage, ...]] = []  # to the conversation, by each turn
        self._lengths: list[int] = []  # of what was read and sampled up to its end
        self._texts: list[str] = []  # of all turns, with what was read between them
        self._tools: tuple[Tool, ...] = ()
        # Of each turn: messages of the conversation up to its answer, and tools offered with it.
        self._offered: list[tuple[int, tuple[Tool, ...]]] = []
        self._replica = ""
        self._num_recalled = 0
        self._phase = "opening"
        self._leased = driver if isinstance(driver, LeasedEpisode) else None
        self._failure = FailureKind.AGENT if self._leased else FailureKind.ENVIRONMENT
        self._call_prefix = "call"
        if self._leased is not None:
            # An agent may work on several samples and look up calls by their ids.
            lease = blake2b(self._leased.lease_id.encode(), digest_size=4)
            self._call_prefix = f"call_{lease.hexdigest()}"

    async def run(self, first_turn: FirstTurn) -> Rollout:
        """Return the sample.

        Raises:
            GroupFailedError: the prompt is refused, or an engine failed and no sample may be
                missing.
        """
        is_closed = False
        try:
            if self._leased is not None:
                await self._wait_until_taken(self._leased)
            async with asyncio.timeout(self._seconds_left()) as scope:
                rollout = await self._play(first_turn)
                is_closed = rollout.end is not None
                return rollout
        except EpisodeFailedError as error:
            return self._failed_rollout(self._failure, str(error))
        except GroupOverError:
            detail = f"its group was over while {self._phase}"
            return self._failed_rollout(FailureKind.ABORTED, detail)
        except TimeoutError:
            if not scope.expired():
                raise
            limit = f"sluice.environment.episode_timeout_s={self._rules.timeout_s:g}"
            detail = f"{limit} seconds had passed while {self._phase}"
            return self._failed_rollout(self._failure, detail)
        except asyncio.CancelledError:
            is_closed = self._leased is not None and self._leased.suspend()
            raise
        finally:
            if not is_closed:
                await abandon_episode(self._driver)

    async def _wait_until_taken(self, leased: LeasedEpisode) -> None:
        with self._dispatcher.outside[self._request.purpose].untaken():
            await self._await_environment(
                "waiting for an agent to take it", leased.wait_until_taken()
            )

    async def _play(self, first_turn: FirstTurn) -> Rollout:
        """Play to the end. If the sample has no `end`, it was aborted and its environment is
        open."""
        if not self._recall():
            observation = await self._await_environment("opening", self._driver.open())
            if observation.done:
                raise EpisodeFailedError(
                    "the environment ended the episode before the first answer"
                )
            start = self._turn_start(observation)
            self._phase = "sampling turn 0"
            sampled_since = time.monotonic()
            answered = await first_turn(self._index, start.messages, self._tools)
            self._add(start, answered, time.monotonic() - sampled_since)
        if self._leased is not None and self._leased.limit is not None:  # in an earlier service
            return await self._finish(self._leased.limit)
        while self._turns[-1].finish_reason is not FinishReason.ABORTED:
            observation = await self._observe()
            end = self._counts.end(self._turns[-1].finish_reason, observation)
            if end is None:
                start, sampled_since = self._turn_start(observation), time.monotonic()
                start, turn = await self._sample_turn(start)
                if turn is not None:
                    self._add(start, turn, time.monotonic() - sampled_since)
                    continue
                end = EpisodeEnd.MAX_TOKENS
            return await self._finish(end)
        return Rollout(self._index, tuple(self._turns))

    def _seconds_left(self) -> float:
        return self._rules.timeout_s if self._leased is None else self._leased.seconds_left()

    def _recall(self) -> bool:
        """Add the turns that an earlier service has sampled; return whether there are any."""
        progress = self._request.progress
        for committed in self._leased.take_recalled() if self._leased is not None else ():
            turn = committed.turn
            if self._turns:
                self._counts.count_answer(_answer_of(self._turns[-1]))
                observation = Observation(committed.messages, is_whole=True)
                self._counts.end(self._turns[-1].finish_reason, observation)
            progress.note_started(committed.prompt_token_ids, asyncio.get_running_loop().time())
            version = min((span.version for span in turn.version_spans), default=None)
            progress.add_recalled(turn.token_ids.size, version)
            self._tools = committed.tools
            self._notes.note_tools(committed.tools)
            self._append(turn, TurnStart(turn.parent, committed.messages), committed.num_read)
        self._num_recalled = len(self._turns)
        return bool(self._turns)

    async def _finish(self, end: EpisodeEnd) -> Rollout:
        if self._leased is not None and end is not EpisodeEnd.DONE:
            self._leased.set_limit(end)
        scored = await self._await_environment("grading", self._driver.close())
        whole_text = "".join(self._texts) if self._rules.grades_whole_text else None
        return Rollout(self._index, tuple(self._turns), end, scored, whole_text)

    async def _observe(self) -> Observation:
        """Give the last answer to the environment; return what it leads to."""
        turn, number = self._turns[-1], len(self._turns) - 1
        answer = self._made_answer(turn)
        self._counts.count_answer(answer)
        since = time.monotonic()
        if self._leased is not None and number >= self._num_recalled:
            self._leased.commit(self._committed_turn(turn))
        call = self._driver.step(number, answer, turn.finish_reason)
        observation = await self._await_environment(f"answering turn {number}", call)
        seconds = {**turn.seconds, ENVIRONMENT: time.monotonic() - since}
        self._turns[-1] = replace(turn, reward=observation.reward, seconds=seconds)
        return observation

    def _made_answer(self, turn: Turn) -> Answer:
        """Return a turn's answer with the calls that will be made; an agent makes all of them."""
        answer = _answer_of(turn)
        max_calls = None if self._leased is not None else self._rules.max_parallel_calls
        return replace(answer, tool_calls=answer.tool_calls[:max_calls])

    def _committed_turn(self, turn: Turn) -> CommittedTurn:
        prompt_token_ids = self._request.progress.prompt_token_ids
        assert prompt_token_ids is not None
        num_read = self._lengths[-1] - turn.token_ids.size
        messages, (_, tools) = self._added[-1][:-1], self._offered[-1]
        return CommittedTurn(messages, tools, turn, num_read, prompt_token_ids)

    def _turn_start(self, observation: Observation) -> TurnStart:
        """Return what the next turn reads, and the turn that it continues."""
        # An agent's request holds the whole conversation, and so all its tools.
        if observation.tools or observation.drops_tools or self._leased is not None:
            self._tools = observation.tools
            self._notes.note_tools(observation.tools)
        # An agent repeats its tools' texts, which it has read uncut.
        messages = observation.messages
        if self._leased is None:
            messages = truncate_tool_texts(messages, self._rules)
        if observation.is_whole:
            # Other tools render as other tokens.
            offered = num_before_new(messages), self._tools
            candidates = [number for number, turn in enumerate(self._offered) if turn == offered]
            start = find_turn_start([self._history(index) for index in candidates], messages)
            if start.parent is not None:
                start = start._replace(parent=candidates[start.parent])
            elif self._turns:
                self._notes.note_rewritten(CONTINUES_NONE)
        elif self._turns:
            start = TurnStart(len(self._turns) - 1, messages)
        else:
            start = TurnStart(None, (*self._request.prompt.messages, *messages))
        if not start.messages:
            raise EpisodeFailedError(
                "the environment sent nothing to read, and the episode is not done"
            )
        return start

    async def _sample_turn(self, start: TurnStart) -> tuple[TurnStart, AnsweredTurn | None]:
        """Sample another turn. Return how it begins, which changes if the template rewrites
        history, and the turn; ``None`` if no token is left."""
        number, parent = len(self._turns), start.parent
        if self._tokens_left(parent) < 1:
            return start, None
        self._phase = f"sampling turn {number}"
        collected = CollectedSamples(self._turn_request(number, start))
        with TRACER.span(SpanName.TURN, {SpanAttribute.SAMPLE_INDEX: self._index}):
            try:
                await self._dispatcher.collect(collected)
            except SequenceTooLongError:
                return start, None
            except HistoryRewrittenError as error:
                if parent is None:
                    raise
                self._notes.note_rewritten(TEMPLATE_REWRITES, str(error))
                history = (*self._history(parent), *start.messages)
                return await self._sample_turn(TurnStart(None, history))
            except GroupFailedError as error:
                if error.kind is not None:
                    raise
                raise unreadable(error) from error
        return start, AnsweredTurn.of(collected, self._index)

    def _turn_request(self, number: int, start: TurnStart) -> GroupRequest:
        sampling = self._request.sampling
        return replace(
            self._request,
            sample_indexes=(self._index,),
            sampling=replace(sampling, seed=turn_seed(sampling.seed, number)),
            turn=TurnRequest(
                number,
                start.messages,
                None if start.parent is None else self._path(start.parent),
                self._tools,
                tool_format="" if self._tools else READ_TEXT,
                affinity=self._id,
                max_sequence_tokens=self._tokens_left(start.parent),
                prefer=self._replica,
            ),
        )

    def _tokens_left(self, parent: int | None) -> int:
        """Return the token limit of a sequence that continues `parent`, given the other
        sequences."""
        rules, max_tokens = self._rules, self._rules.max_sequence_tokens
        prompt = self._request.progress.prompt_token_ids
        if rules.max_response_tokens is not None and prompt is not None:
            max_tokens = min(max_tokens, prompt.size + rules.max_response_tokens)
        if rules.max_trained_tokens is None:
            return max_tokens
        inner = {parent, *(turn.parent for turn in self._turns)}
        num_other_tokens = sum(
            size for index, size in enumerate(self._lengths) if index not in inner
        )
        return min(max_tokens, rules.max_trained_tokens - num_other_tokens)

    def _add(self, start: TurnStart, answered: AnsweredTurn, seconds: float) -> None:
        """Add a sampled turn and what it read after the turn that it continues."""
        (turn,), prompt_token_ids = answered.rollout.turns, answered.prompt_token_ids
        group_prompt = self._request.progress.prompt_token_ids
        is_new_root = False
        if prompt_token_ids is None:
            context = turn.context
        elif start.parent is not None:
            context = prompt_token_ids[self._lengths[start.parent] :]
        else:
            is_new_root = group_prompt is None or not np.array_equal(prompt_token_ids, group_prompt)
            context = prompt_token_ids if is_new_root else turn.context
        turn = replace(
            turn,
            parent=start.parent,
            context=context,
            is_new_root=is_new_root,
            seconds={QUEUE: answered.queued_s, MODEL: seconds - answered.queued_s},
        )
        if self._rules.grades_whole_text:
            self._texts += [self._read_text(start, answered), turn.text]
        self._append(turn, start, 0 if prompt_token_ids is None else prompt_token_ids.size)
        self._replica = answered.replica

    def _append(self, turn: Turn, start: TurnStart, num_read: int) -> None:
        observed = start.messages if turn.context.size else self._beyond_row(start)
        earlier = () if start.parent is None else self._history(start.parent)
        used_ids = {
            call.call_id for message in (*earlier, *start.messages) for call in message.tool_calls
        }
        prefix = f"{self._call_prefix}_{len(self._turns)}"
        answer = turn.answer and with_new_ids(turn.answer, prefix, used_ids)
        turn = replace(turn, observed=observed, answer=answer)
        self._turns.append(turn)
        self._lengths.append(num_read + turn.token_ids.size)
        self._added.append((*start.messages, answer_message(self._made_answer(turn))))
        size = 0 if start.parent is None else self._offered[start.parent][0]
        self._offered.append((size + len(self._added[-1]), self._tools))

    def _read_text(self, start: TurnStart, answered: AnsweredTurn) -> str:
        """Return what a turn read after the answer before it."""
        if start.parent is not None or not self._turns:
            return answered.continued_text
        # A template that rewrites history has no tokens between an answer and what follows it.
        new_messages = start.messages[num_before_new(start.messages) :]
        return "".join(f"\n{message.content}\n" for message in new_messages)

    def _beyond_row(self, start: TurnStart) -> tuple[ChatMessage, ...]:
        """Return what a root reads after the row's messages."""
        row = self._request.prompt.messages
        return start.messages[len(row) :] if start.messages[: len(row)] == row else start.messages

    def _history(self, index: int) -> tuple[ChatMessage, ...]:
        """Return the conversation up to a turn's answer."""
        parts: list[tuple[ChatMessage, ...]] = []
        at: int | None = index
        while at is not None:
            parts.append(self._added[at])
            at = self._turns[at].parent
        return tuple(message for part in reversed(parts) for message in part)

    def _path(self, index: int) -> TokenIds:
        """Return what was read and sampled up to the end of a turn, [tokens]."""
        parts: list[TokenIds] = []
        at: int | None = index
        while at is not None:
            turn = self._turns[at]
            parts += [turn.token_ids, turn.context]
            if turn.parent is None and not turn.is_new_root:
                group_prompt = self._request.progress.prompt_token_ids
                assert group_prompt is not None
                parts.append(group_prompt)
            at = turn.parent
        return np.concatenate(parts[::-1])

    def _failed_rollout(self, kind: FailureKind, detail: str) -> Rollout:
        turns = tuple(self._turns) or GrowingSample().rollout(self._index).turns
        return Rollout(self._index, turns, outcome=Failed(kind, detail))

    async def _await_environment(self, phase: str, call: Awaitable[ResultT]) -> ResultT:
        """Wait for the environment, at most until the group is over."""
        self._phase = phase
        with self._dispatcher.outside[self._request.purpose].waiting(self._failure.value):
            return await self._request.progress.run_until_over(call)


def unreadable(error: GroupFailedError) -> EpisodeFailedError:
    """Return the failure of a sample whose environment sent text that every replica refuses."""
    return EpisodeFailedError(f"what the environment sent cannot be read by the policy: {error}")


def _answer_of(turn: Turn) -> Answer:
    return turn.answer or Answer(turn.text)
