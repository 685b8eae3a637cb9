"""What is kept of leased samples, so that a restarted service continues them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sluice.types import ChatMessage, TokenIds, Tool, Turn


@dataclass(frozen=True, slots=True)
class PostedEnd:
    """How a program ended its sample.

    Args:
        reward: finite; ``None``: scorers grade the last answer.
        failure: why the program failed; empty: it did not.
    """

    reward: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class CommittedTurn:
    """A turn that a program may have seen.

    Args:
        messages: that its request adds to the turn that it continues; of a root, all of them.
        tools: that the policy could call.
        turn: what was sampled.
        num_read: tokens that the policy read.
        prompt_token_ids: the prompt of its group, [prompt tokens].
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    turn: Turn
    num_read: int
    prompt_token_ids: TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class LeaseRecord:
    """A leased sample.

    Args:
        lease_id: secret.
        prompt_id: of its group.
        sample_index: within its group.
        expires_s: when the lease expires, seconds since 1970.
        turns: by the digests of their requests, in the order of their calls.
        end: ``None``: none was posted.
        holder: who has leased it; empty: nobody in particular.
        keep_alive_s: seconds without a call of the holder after which it fails; 0: it does not.
    """

    lease_id: str
    prompt_id: str
    sample_index: int
    expires_s: float
    turns: Mapping[str, CommittedTurn] = field(default_factory=dict)
    end: PostedEnd | None = None
    holder: str = ""
    keep_alive_s: float = 0.0


class LeaseStore(Protocol):
    """Keeps leases while their prompts are pending.

    Attributes:
        found: what an earlier service left.
        on_revoked: called with the id of a prompt whose leases are dropped.
    """

    found: Sequence[LeaseRecord]
    on_revoked: Callable[[str], None]

    def taken(self, record: LeaseRecord) -> bool:
        """Keep a new lease, in place of the sample's earlier one; return whether it is kept."""
        ...

    def committed(self, lease_id: str, number: int, digest: str, turn: CommittedTurn) -> None:
        """Keep the turn with this number of a kept lease."""
        ...

    def ended(self, lease_id: str, end: PostedEnd) -> None:
        """Keep the end of a kept lease."""
        ...
