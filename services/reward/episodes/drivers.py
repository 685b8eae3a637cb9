"""What an episode needs of its environment."""

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
"""Most seconds of giving an episode up; a server that does not answer drops it later."""


class EpisodeFailedError(SluiceError):
    """An environment or a program of the user did not answer as agreed. Names the peer.

    The sample then has no reward.
    """


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """A new episode.

    Args:
        episode_id: unique, at most 128 bytes.
        environment: the row's; empty: the run's only one.
        prompt: the row.
        seed: the same for all samples of a prompt.
        timeout_s: seconds after which the environment may drop it.
        sample_index: within its group.
        is_kept: whether a restarted service continues it, since its prompt starts again then.
    """

    episode_id: str
    environment: str
    prompt: Prompt
    seed: int
    timeout_s: float
    sample_index: int = 0
    is_kept: bool = False


class EpisodeDriver(Protocol):
    """One episode's environment. Its calls do not overlap.

    All but `abandon` raise EpisodeFailedError.
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
    """Where episodes run."""

    def begin(self, task: EpisodeTask) -> EpisodeDriver:
        """Return the driver of a new episode."""
        ...


AddressFor = Callable[[str], str]
"""Returns where the episode with an id shall run: host:port, or ``unix:`` and a path. Raises
EpisodeFailedError if no server is up."""


def server_of(episode_id: str, num_servers: int) -> int:
    """Return the index of the server where an episode runs: each gets an equal share.

    A digest, since a checksum has the same last bits for all samples of a small group: they would
    run together, and fail together.
    """
    digest = blake2b(episode_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_servers


async def abandoned(driver: EpisodeDriver) -> None:
    """Give an episode up, however its task ends."""
    try:
        async with asyncio.timeout(ABANDON_S):
            await driver.abandon()
    except TimeoutError:
        return
