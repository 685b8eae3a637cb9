"""Prompts submitted by clients: receipts at once, outcomes when the prompts end.

A client that goes away loses its outcomes, not its prompts: what was accepted is trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from services.reward.ledger import PromptLedger
from services.reward.outcomes import PromptOutcome
from services.reward.prompt_source import DATASET_ID_PREFIX
from sluice.errors import DataError, InvalidRequestError
from sluice.types import ChatMessage, Prompt, PromptOrigin

MAX_ID_BYTES = 128
MAX_UNSENT = 1024


@dataclass(frozen=True, slots=True)
class Submission:
    """A prompt as a client sent it."""

    prompt_id: str
    messages: tuple[ChatMessage, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Receipt:
    """`sequence` is ``None`` when the prompt was refused."""

    prompt_id: str
    sequence: int | None
    refused_because: str = ""


class SubmissionSession:
    """One client's call: receipts and outcomes on their way to it."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Receipt | PromptOutcome | None] = asyncio.Queue()
        self._is_closed = False
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.num_open = 0

    def put(self, event: Receipt | PromptOutcome) -> None:
        """Tell the client."""
        self._events.put_nowait(event)
        if self._events.qsize() >= MAX_UNSENT:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait until the client has read enough of what it was told to be given more."""
        await self._has_room.wait()

    def close_input(self) -> None:
        """No more prompts come: the call ends when all of them have ended."""
        self._is_closed = True
        self._events.put_nowait(None)

    def end(self) -> None:
        """The service ends: the call does, whatever is unfinished."""
        self.num_open = 0
        self.close_input()

    async def next_event(self) -> Receipt | PromptOutcome | None:
        """What to send next; ``None`` at the end."""
        while not (self._is_closed and self.num_open == 0 and self._events.empty()):
            event = await self._events.get()
            if self._events.qsize() < MAX_UNSENT:
                self._has_room.set()
            if event is not None:
                return event
        return None


class Submissions:
    """All clients.

    Args:
        ledger: numbers prompts.
        accept: hands an accepted prompt to the loop; `InvalidRequestError` for a used id.
        check_data_source: raises `DataError` where no scorer knows a data source.
        max_pending: unfinished client prompts at once.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        accept: Callable[[Prompt], None],
        check_data_source: Callable[[str], None],
        max_pending: int,
    ) -> None:
        self._ledger, self._accept, self._max_pending = ledger, accept, max_pending
        self._check_data_source = check_data_source
        self._sessions: dict[str, SubmissionSession] = {}
        self._open_sessions: set[SubmissionSession] = set()
        self._num_pending = 0

    def submit(self, submission: Submission, session: SubmissionSession) -> None:
        """Accept or refuse a prompt; the receipt goes to the session."""
        try:
            prompt = self._accepted(submission)
        except (InvalidRequestError, DataError) as error:
            session.put(Receipt(submission.prompt_id, None, str(error)))
            return
        self._num_pending += 1
        self._sessions[prompt.prompt_id] = session
        session.num_open += 1
        session.put(Receipt(prompt.prompt_id, prompt.sequence))

    def ended(self, outcome: PromptOutcome) -> None:
        """A prompt ended: tell its client, if it has one that still listens."""
        if outcome.prompt.origin is not PromptOrigin.CLIENT:
            return
        self._num_pending -= 1
        session = self._sessions.pop(outcome.prompt.prompt_id, None)
        if session is not None:
            session.num_open -= 1
            session.put(outcome)

    @contextmanager
    def session(self) -> Iterator[SubmissionSession]:
        """A client's session; when it leaves its prompts stay."""
        session = SubmissionSession()
        self._open_sessions.add(session)
        try:
            yield session
        finally:
            self._open_sessions.discard(session)
            for prompt_id in [key for key, owner in self._sessions.items() if owner is session]:
                del self._sessions[prompt_id]

    def end(self) -> None:
        """The service ends: all calls do."""
        for session in self._open_sessions:
            session.end()

    def _accepted(self, submission: Submission) -> Prompt:
        size = len(submission.prompt_id.encode())
        if not 1 <= size <= MAX_ID_BYTES:
            raise InvalidRequestError(f"prompt_id: {size} bytes; use 1 to {MAX_ID_BYTES}")
        if submission.prompt_id.startswith(DATASET_ID_PREFIX):
            raise InvalidRequestError(
                f"prompt_id '{submission.prompt_id}': '{DATASET_ID_PREFIX}…' names data-set rows; "
                "choose another"
            )
        if not submission.messages or not all(turn.role for turn in submission.messages):
            raise InvalidRequestError("messages: send at least one turn, each with a role")
        if not submission.data_source:
            raise InvalidRequestError("data_source: empty; it routes the prompt to its scorer")
        if self._num_pending >= self._max_pending:
            raise InvalidRequestError(
                f"{self._num_pending} prompts are unfinished, the most that "
                "sluice.reward.max_client_pending allows; wait for outcomes"
            )
        self._check_data_source(submission.data_source)
        prompt = Prompt(
            prompt_id=submission.prompt_id,
            sequence=self._ledger.next_sequence(),
            messages=submission.messages,
            data_source=submission.data_source,
            ground_truth=submission.ground_truth,
            origin=PromptOrigin.CLIENT,
            position=None,
            extra_info=submission.extra_info,
        )
        self._accept(prompt)
        return prompt
