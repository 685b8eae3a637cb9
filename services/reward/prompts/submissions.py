"""Take prompts from clients: send a receipt for each, and the outcome when the prompt ends.

A receipt or an outcome is sent after the ledger has committed it. A client that disconnects loses
no prompt. It may send the same prompt again, in another call or to a restarted service: the prompt
is not accepted twice, and the client gets its receipt again, and its outcome too, while the ledger
remembers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from services.reward.group_table import EventKind, GroupEvent, PromptOutcome
from services.reward.ledger.ledger import PromptLedger
from services.reward.ledger.schema import EndedPrompt, body_digest, encode_body
from services.reward.prompts.source import DATASET_ID_PREFIX, VALIDATION_ID_PREFIX
from sluice.config.schema.service import LimitsConfig
from sluice.errors import DataError, ExhaustedError, InvalidRequestError, SluiceError
from sluice.rpc.status import QUOTA_REFUSALS
from sluice.types import Prompt

MAX_ID_BYTES = 128
MAX_UNSENT = 1024


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a submitted prompt; `sequence` is ``None`` if it was refused."""

    prompt_id: str
    sequence: int | None
    refused_because: str = ""
    is_retryable: bool = False

    @classmethod
    def refusal(cls, prompt_id: str, error: SluiceError) -> Receipt:
        """Return the receipt of a prompt refused by `error`; it may be retried if exhausted."""
        short_id = prompt_id[:MAX_ID_BYTES]
        return cls(short_id, None, str(error), isinstance(error, ExhaustedError))


class SubmissionSession:
    """One client's call, with the receipts and outcomes that wait to be sent.

    Args:
        ledger: commits each event before it is sent.
        client: its name, for quotas; ``None``: anonymous.
    """

    def __init__(self, ledger: PromptLedger, client: str | None = None) -> None:
        self._ledger, self.client = ledger, client
        self._events: asyncio.Queue[tuple[int, Receipt | PromptOutcome] | None] = asyncio.Queue()
        self._is_closed = False
        self._may_receive = asyncio.Event()  # cleared while the client reads too slowly
        self._may_receive.set()
        self.num_open = 0
        self.is_ended = False

    def put(self, event: Receipt | PromptOutcome) -> None:
        """Queue an event; it is sent once the ledger's changes so far are durable."""
        self._events.put_nowait((self._ledger.last_change(), event))
        if self._events.qsize() >= MAX_UNSENT:
            self._may_receive.clear()

    async def wait_to_receive(self) -> None:
        """Wait while `MAX_UNSENT` events or more wait for the client to read them."""
        await self._may_receive.wait()

    def close_input(self) -> None:
        """Note that no more prompts come: end the call when all of them have ended."""
        self._is_closed = True
        self._events.put_nowait(None)

    def lose(self) -> None:
        """Stop waiting for a prompt: from now on another call waits for it."""
        self.num_open -= 1
        self._events.put_nowait(None)

    def end(self) -> None:
        """End the call with the service, even if prompts are unfinished; accept no more."""
        self.is_ended = True
        self.close_input()

    async def next_event(self) -> Receipt | PromptOutcome | None:
        """Wait for the next event; ``None`` at the end.

        Raises:
            DataError, DeadlineError: the ledger cannot be written.
        """
        while not (self._is_closed and self._has_all() and self._events.empty()):
            reported = await self._events.get()
            if self._events.qsize() < MAX_UNSENT:
                self._may_receive.set()
            if reported is not None:
                change_number, event = reported
                await self._ledger.durable(change_number)
                return event
        return None

    def _has_all(self) -> bool:
        return self.is_ended or self.num_open <= 0


class Submissions:
    """The sessions of all clients.

    Args:
        ledger: numbers prompts.
        accept: hands a prompt to the loop; raises `InvalidRequestError` for a used id.
        check_data_source: raises `DataError` if no scorer knows a data source; ``None``: none is
            refused.
        max_pending: largest number of unfinished client prompts.
        limits: of clients; ``None``: the default ones.
    """

    def __init__(
        self,
        ledger: PromptLedger,
        accept: Callable[[Prompt], None],
        check_data_source: Callable[[str], object] | None,
        max_pending: int,
        limits: LimitsConfig | None = None,
    ) -> None:
        self._ledger, self._accept, self._max_pending = ledger, accept, max_pending
        self._limits = limits or LimitsConfig()
        self._check_data_source = check_data_source
        self._sessions: dict[str, SubmissionSession] = {}
        self._open_sessions: set[SubmissionSession] = set()

    def submit(self, sent_prompt: Prompt, session: SubmissionSession) -> None:
        """Accept or refuse a prompt, or recognise a repeated one, and put the receipt into the
        session.

        Args:
            sent_prompt: the prompt as the client sent it; gets its sequence here if accepted.
            session: the session of the call.
        """
        if (ended_prompt := self._known_end(sent_prompt)) is not None:
            session.put(Receipt(sent_prompt.prompt_id, ended_prompt.sequence))
            session.put(
                PromptOutcome(
                    sent_prompt.prompt_id,
                    ended_prompt.end,
                    ended_prompt.step,
                    ended_prompt.rewards,
                    ended_prompt.detail,
                )
            )
            return
        try:
            prompt = self._known_pending(sent_prompt, session)
            if prompt is None:
                prompt = self._accept_new(sent_prompt, session)
        except (InvalidRequestError, DataError, ExhaustedError) as error:
            session.put(Receipt.refusal(sent_prompt.prompt_id, error))
            return
        if (previous_session := self._sessions.get(prompt.prompt_id)) is not None:
            previous_session.lose()
        self._sessions[prompt.prompt_id] = session
        session.num_open += 1
        session.put(Receipt(prompt.prompt_id, prompt.sequence))

    def observe(self, event: GroupEvent) -> None:
        """Send the outcome of a prompt that ended to its client, if one still listens."""
        if event.kind is EventKind.ENDED:
            session = self._sessions.pop(event.group.prompt_id, None)
            if session is not None:
                session.num_open -= 1
                session.put(event.group.outcome)

    @contextmanager
    def session(self, client: str | None = None) -> Iterator[SubmissionSession]:
        """Open a client's session; its prompts stay when it ends.

        Raises:
            ExhaustedError: too many sessions are open.
        """
        if len(self._open_sessions) >= self._limits.max_submit_streams:
            raise ExhaustedError(
                f"{len(self._open_sessions)} SubmitPrompts calls are open, the most that "
                "sluice.limits.max_submit_streams allows; end one, or send all prompts in one call"
            )
        session = SubmissionSession(self._ledger, client)
        self._open_sessions.add(session)
        try:
            yield session
        finally:
            self._open_sessions.discard(session)
            for prompt_id in [key for key, owner in self._sessions.items() if owner is session]:
                del self._sessions[prompt_id]

    def end(self) -> None:
        """End all calls with the service."""
        for session in self._open_sessions:
            session.end()

    def _accept_new(self, sent_prompt: Prompt, session: SubmissionSession) -> Prompt:
        """Accept a new prompt.

        Raises:
            InvalidRequestError, DataError: it can never be accepted; checked first.
            ExhaustedError: the client should wait and send the prompt again.
        """
        _check_fields(sent_prompt)
        if self._check_data_source is not None:
            self._check_data_source(sent_prompt.data_source)
        max_bytes = self._limits.max_client_images_mb << 20
        limit = f"sluice.limits.max_client_images_mb allows {max_bytes >> 20} MiB"
        size, held_bytes = sum(map(len, sent_prompt.images)), self._ledger.client_image_bytes
        if size > max_bytes:
            raise InvalidRequestError(f"images: {size} bytes; {limit}; send fewer or smaller ones")
        self._ledger.check_unused(sent_prompt.prompt_id)
        self._check_quotas(session)
        if self._ledger.num_clients_pending >= self._max_pending:
            raise ExhaustedError(
                f"{self._ledger.num_clients_pending} prompts are unfinished, the most that "
                "sluice.reward.max_client_pending allows; wait for outcomes"
            )
        if size and held_bytes + size > max_bytes:
            raise ExhaustedError(
                f"images: {size} bytes, and unfinished prompts hold {held_bytes} bytes of images; "
                f"{limit}; wait for outcomes"
            )
        prompt = replace(sent_prompt, sequence=self._ledger.next_sequence())
        self._accept(prompt)
        return prompt

    def _check_quotas(self, session: SubmissionSession) -> None:
        """Raise `ExhaustedError` if the call, or its client, has too many unfinished prompts."""
        if session.num_open >= self._limits.max_prompts_per_stream:
            QUOTA_REFUSALS.add("sluice.limits.max_prompts_per_stream")
            raise ExhaustedError(
                f"{session.num_open} prompts of this call are unfinished, the most that "
                "sluice.limits.max_prompts_per_stream allows; wait for outcomes"
            )
        if session.client is None:
            return
        num_open = sum(s.num_open for s in self._open_sessions if s.client == session.client)
        if num_open >= self._limits.max_client_prompts:
            QUOTA_REFUSALS.add("sluice.limits.max_client_prompts")
            raise ExhaustedError(
                f"client {session.client!r}: {num_open} prompts are unfinished, the most that "
                "sluice.limits.max_client_prompts allows; wait for outcomes"
            )

    def _known_pending(self, sent_prompt: Prompt, session: SubmissionSession) -> Prompt | None:
        """Return the pending prompt that `sent_prompt` repeats from another call, if any."""
        prompt = self._ledger.prompts.get(sent_prompt.prompt_id)
        # An id that comes twice in one call is a client's mistake, not a prompt sent again.
        if prompt is None or self._sessions.get(prompt.prompt_id) is session:
            return None
        return prompt if replace(sent_prompt, sequence=prompt.sequence) == prompt else None

    def _known_end(self, sent_prompt: Prompt) -> EndedPrompt | None:
        """Return the end of an ended prompt that `sent_prompt` repeats."""
        ended_prompt = self._ledger.ended.get(sent_prompt.prompt_id)
        if ended_prompt is None:
            return None
        try:
            digest = body_digest(encode_body(sent_prompt))
        except InvalidRequestError:
            return None
        return ended_prompt if digest == ended_prompt.digest else None


def _check_fields(prompt: Prompt) -> None:
    size = len(prompt.prompt_id.encode())
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidRequestError(f"prompt_id: {size} bytes; use 1 to {MAX_ID_BYTES}")
    for prefix in (DATASET_ID_PREFIX, VALIDATION_ID_PREFIX):
        if prompt.prompt_id.startswith(prefix):
            raise InvalidRequestError(
                f"prompt_id '{prompt.prompt_id}': '{prefix}…' names data-set rows; choose another"
            )
    if not prompt.messages or not all(turn.role for turn in prompt.messages):
        raise InvalidRequestError("messages: send at least one turn, each with a role")
    if not prompt.data_source:
        raise InvalidRequestError("data_source: empty; it routes the prompt to its scorer")
