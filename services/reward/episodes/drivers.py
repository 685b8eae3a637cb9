"""The interface between an episode and its environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from sluice.algorithm.episode_rules import Observation
from sluice.errors import SluiceError
from sluice.types import Answer, FinishReason, Prompt, Scored

ABANDON_S = 5.0
"""Seconds allowed for giving an episode up; a server that does not answer drops it later."""


class EpisodeFailedError(SluiceError):
    """An environment or a program of the user did not answer as agreed. Names the peer.

    The sample then has no reward.
    """


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """A new episode.

    Args:
        episode_id: unique, at most 128 bytes.
        environment: the row's; empty for the run's only one.
        prompt: the prompt.
        seed: the same for all samples of a prompt.
        timeout_s: seconds after which the environment may drop it.
        sample_index: within its group.
        is_kept: whether a restarted service continues the episode when its prompt starts again.
    """

    episode_id: str
    environment: str
    prompt: Prompt
    seed: int
    timeout_s: float
    sample_index: int = 0
    is_kept: bool = False


class EpisodeDriver(Protocol):
    """The environment of one episode. Calls do not overlap.

    All methods but `abandon` raise EpisodeFailedError.
    """

    async def open(self) -> Observation:
        """Begin; return what the policy reads after the row's prompt."""
        ...

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Take the answer with this number, from 0; return what the policy reads next."""
        ...

    async def close(self) -> Scored | None:
        """End; return the score, or ``None`` if scorers grade the last answer."""
        ...

    async def abandon(self) -> None:
        """Give the episode up, within `ABANDON_S`. Raise no error."""
        ...


class EpisodeDrivers(Protocol):
    """Creates the drivers of episodes."""

    def begin(self, task: EpisodeTask) -> EpisodeDriver:
        """Return the driver of a new episode."""
        ...


AddressFor = Callable[[str], str]
"""Returns the server for an episode id: host:port, or ``unix:`` and a path. Raises
EpisodeFailedError if no server is up."""


def server_of(episode_id: str, num_servers: int) -> int:
    """Return the index of an episode's server; each server gets an equal share.

    Use a digest: a checksum has equal last bits for all samples of a small group, which would then
    run, and fail, on one server.
    """
    digest = blake2b(episode_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_servers


async def abandon_episode(driver: EpisodeDriver) -> None:
    """Give an episode up; stop waiting after `ABANDON_S`."""
    try:
        async with asyncio.timeout(ABANDON_S):
            await driver.abandon()
    except TimeoutError:
        return
