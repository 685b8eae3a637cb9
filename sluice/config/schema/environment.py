"""`sluice.environment.*`: the user's environment of multi-turn episodes, and its limits."""

from __future__ import annotations

import msgspec

from sluice.config.schema.section import PositiveFloat, PositiveInt, Section


class EnvironmentConfig(Section, frozen=True):
    """The environment of multi-turn episodes; without `path` and `addresses` a sample is one
    answer.
    """

    path: str | None = None
    """Python file that defines the environment; none: there is none, or `addresses` have it."""

    name: str | None = None
    """Class or async function in that file; none: its only one that is public."""

    addresses: list[str] = msgspec.field(default_factory=list)
    """host:port of servers of EnvironmentService, in place of `path`; after https:// with TLS."""

    agents: bool = False
    """Lease samples to programs that speak OpenAI's protocol, in place of `path`."""

    workers: PositiveInt = 2
    """Processes that run the environment of `path`."""

    memory_limit_mb: PositiveInt = 4096
    """Largest address space of a worker, MiB."""

    call_timeout_s: PositiveFloat = 60.0
    """Most seconds of one call of the environment; a worker that needs longer is killed."""

    episode_timeout_s: PositiveFloat = 1800.0
    """Most seconds of an episode, its answers included; then its sample has failed."""

    max_invalid_calls: PositiveInt = 3
    """Answers in a row with calls that cannot be read after which an episode ends."""
