"""The same call to many peers at once, with each one's answer or error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sluice.errors import PeerError, SluiceError

PeerT = TypeVar("PeerT")
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class Answers(Generic[PeerT, AnswerT]):
    """Who answered what, and who failed how. Every peer is in exactly one of the two."""

    answered: dict[PeerT, AnswerT] = field(default_factory=dict)
    failed: dict[PeerT, SluiceError] = field(default_factory=dict)


async def fan_out(
    peers: Iterable[PeerT],
    call: Callable[[PeerT], Awaitable[AnswerT]],
    *,
    on_failure: Callable[[], Awaitable[None]] | None = None,
    phase: str = "a joint call",
) -> Answers[PeerT, AnswerT]:
    """Calls every peer concurrently and waits for all.

    Args:
        peers: whom to call.
        call: one peer's call; ends by its own deadline.
        on_failure: run once, at the first failure, while other calls are still under way (to
            make them end: a collective that lost a member does not end by itself). Calls that go
            on all the same when it returns are given up and count as failed.
        phase: what the calls are about, for errors.
    """
    answers: Answers[PeerT, AnswerT] = Answers()
    scopes: set[asyncio.Timeout] = set()
    first_failure = asyncio.Event()

    async def ask(peer: PeerT) -> None:
        try:
            async with asyncio.timeout(None) as scope:
                scopes.add(scope)
                answers.answered[peer] = await call(peer)
        except SluiceError as error:
            answers.failed[peer] = error
        except TimeoutError:
            name = str(getattr(peer, "name", peer))
            answers.failed[peer] = PeerError(name, phase, "given up: another failed")
        finally:
            scopes.discard(scope)
        if peer in answers.failed:
            first_failure.set()

    async def react(handler: Callable[[], Awaitable[None]]) -> None:
        await first_failure.wait()
        await handler()
        for scope in scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async with asyncio.TaskGroup() as outer:
        reaction = outer.create_task(react(on_failure), name="on-failure") if on_failure else None
        async with asyncio.TaskGroup() as calls:
            for peer in peers:
                calls.create_task(ask(peer), name=f"call-{peer}")
        if reaction is not None and not first_failure.is_set():
            reaction.cancel()
    return answers
