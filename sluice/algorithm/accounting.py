"""Account for the tokens of a run and for the time of its trainer and replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

# The uses of tokens that the reward service received.
RECEIVED = (
    "trained",
    "filtered_all_right",
    "filtered_all_wrong",
    "filtered_uniform",
    "stale",
    "preempted",
    "failed",
    "aborted",
    "surplus",
    "taken_over",
    "rolled_back",
    "evaluation",
    "pending",
)
TOKENS_AGE, TOKENS_MOVED = "tokens_age_s", "tokens_moved"
DATA_EXHAUSTED = "data_exhausted"
"""1 if the run ended because its data set had no more prompts, else 0."""
# Sampled in calls that are still running at the replicas, and not sent yet.
_UNDER_WAY = "under_way"
# Sampled for callers outside the run: the SDK, the command line, the OpenAI-compatible server.
_DIRECT_CLIENTS = "direct_clients"
_ABORTED = "aborted"
_BEFORE_RESTART = "before_restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounters:
    """Counters of one replica's process since its start, or sums of them over replicas.

    Engines fill it, heartbeats and status calls carry it field by field, and the run's accounts
    add it up. Fields have the names of the protos, so a new counter needs a field here and in
    the protos, a value in the engines, and its use.

    Attributes:
        slots_busy: sequences that run now.
        queued: sequences that wait for a slot now.
        generated_tokens: sampled tokens. Each was sent, is unsent, or is still running.
        unsent_tokens: tokens of calls that ended before these tokens were sent.
        running_tokens: tokens of open calls that are not sent yet.
        direct_sent_tokens: tokens sent to callers that are no service of the run.
        direct_unsent_tokens: the part of `unsent_tokens` that was sampled for such callers.
        prompt_tokens: tokens of the prompts of samples that began.
        reused_tokens: those of them that came from a prefix cache.
        busy_seconds: time with at least one running sequence.
        wall_seconds: age of the process, by another clock than `seconds_by_state`.
        seconds_by_state: time by state of the engine; they add up to the age of the process.
    """

    slots_busy: int = 0
    queued: int = 0
    generated_tokens: int = 0
    unsent_tokens: int = 0
    running_tokens: int = 0
    direct_sent_tokens: int = 0
    direct_unsent_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    busy_seconds: float = 0.0
    wall_seconds: float = 0.0
    seconds_by_state: Mapping[str, float] = field(default_factory=dict)

    @property
    def sent_tokens(self) -> int:
        """Tokens sent to services of the run."""
        unsent_tokens = self.unsent_tokens + self.running_tokens
        return self.generated_tokens - unsent_tokens - self.direct_sent_tokens

    def with_running_unsent(self) -> ReplicaCounters:
        """Return the counters of a replica that left: its running tokens count as unsent."""
        unsent = self.unsent_tokens + self.running_tokens
        return replace(self, slots_busy=0, queued=0, unsent_tokens=unsent, running_tokens=0)


COUNTER_NAMES = tuple(one.name for one in fields(ReplicaCounters))
"""Names of all counters, here and in the protos."""


def fleet_counters(replicas: Iterable[ReplicaCounters]) -> ReplicaCounters:
    """Return the sums over replicas."""
    counters, seconds = tuple(replicas), Counter[str]()
    for replica in counters:
        seconds.update(replica.seconds_by_state)
    sums: dict[str, Any] = {
        name: sum(getattr(replica, name) for replica in counters)
        for name in COUNTER_NAMES
        if name != "seconds_by_state"
    }
    return ReplicaCounters(**sums, seconds_by_state=dict(seconds))


@dataclass(frozen=True, slots=True)
class Account:
    """A total and its parts, in tokens or in seconds."""

    total: float
    parts: Mapping[str, float]

    @property
    def residual(self) -> float:
        """The total less its parts; negative if the parts exceed the total."""
        return self.total - sum(self.parts.values())

    @property
    def residual_share(self) -> float:
        """Absolute residual over the total; 0 if the total is 0."""
        residual = abs(self.residual)
        return residual / max(self.total, residual) if residual else 0.0


@dataclass(frozen=True, slots=True)
class RunAccounts:
    """The accounts at one moment. `tokens` is ``None`` while the reward service is out of reach.

    `tokens` may be older than the others by `tokens_age_s`. Its residual may be off by
    `tokens_moved` tokens, which arrived while the counters were read.
    """

    tokens: Account | None
    trainer: Account
    rollout: Account
    tokens_age_s: float = 0.0
    tokens_moved: int = 0

    def as_mapping(self) -> dict[str, float]:
        """Return all numbers by their names in `accounts.json`, with totals and residuals."""
        named = {
            f"{prefix}/{part}": value
            for prefix, account in (
                ("tokens", self.tokens),
                ("trainer_s", self.trainer),
                ("rollout_s", self.rollout),
            )
            if account is not None
            for part, value in account.parts.items()
        }
        totals = (
            ("tokens", "generated_tokens", self.tokens),
            ("trainer_seconds", "trainer_wall_s", self.trainer),
            ("rollout_seconds", "rollout_wall_s", self.rollout),
        )
        for name, total, account in totals:
            if account is not None:
                named[total] = account.total
                named[f"{name}_residual"] = account.residual
                named[f"{name}_residual_share"] = account.residual_share
        if self.tokens is not None:
            named[TOKENS_AGE] = self.tokens_age_s
            named[TOKENS_MOVED] = float(self.tokens_moved)
        return named


def token_account(fleet: ReplicaCounters, received: Mapping[str, float]) -> Account:
    """Return the account of all tokens that replicas sampled.

    Tokens of a call that ended before they were sent count as aborted, like those of samples that
    the reward service aborted. All tokens of other clients' calls, sent or not, count for those
    clients.
    """
    parts = {name: float(received.get(name, 0.0)) for name in RECEIVED}
    parts[_ABORTED] += fleet.unsent_tokens - fleet.direct_unsent_tokens
    parts[_UNDER_WAY] = float(fleet.running_tokens)
    parts[_DIRECT_CLIENTS] = float(fleet.direct_sent_tokens + fleet.direct_unsent_tokens)
    return Account(float(fleet.generated_tokens), parts)


def with_tokens_before_restart(account: Account, tokens: float) -> Account:
    """Return the account with the tokens whose counts restarted processes lost.

    Args:
        account: the account of the counters since the restart.
        tokens: its least residual since the restart. If positive, replicas sampled
            them for a reward service that has lost its counts: one more part. If negative, the
            reward service received them from replicas that the present trainer never met: they
            belong to the total.
    """
    if tokens > 0:
        return Account(account.total, {**account.parts, _BEFORE_RESTART: tokens})
    return Account(account.total - tokens, account.parts)


def run_accounts(
    fleet: ReplicaCounters,
    received: Mapping[str, float] | None,
    trainer_s: Mapping[str, float],
    trainer_wall_s: float,
) -> RunAccounts:
    """Return the three accounts: tokens, trainer time, replica time.

    Args:
        fleet: sums over all replicas of the run; replicas that left count as `with_running_unsent`.
        received: tokens that the reward service got, by use (`RECEIVED`; missing uses are 0, others
            are ignored); None: not known.
        trainer_s: the trainer's seconds by phase.
        trainer_wall_s: seconds since its process started, by another clock.
    """
    return RunAccounts(
        None if received is None else token_account(fleet, received),
        Account(trainer_wall_s, dict(trainer_s)),
        Account(fleet.wall_seconds, dict(fleet.seconds_by_state)),
    )


@dataclass(frozen=True, slots=True)
class TokenReading:
    """The fleet's counters, read between two readings of the reward service's.

    Tokens flow from the fleet to the service all the time, so no two readings match. Two readings
    of the service bound the difference: a token that arrived between them may be missing from the
    fleet's counters, because it was sampled after they were read.

    Attributes:
        before: tokens that the reward service had got, by use.
        fleet: sums over the replicas, read after `before`.
        after: as `before`, read after all replicas had answered.
    """

    before: Mapping[str, float]
    fleet: ReplicaCounters
    after: Mapping[str, float]

    @property
    def moved_tokens(self) -> int:
        """Tokens that the reward service got between its two readings.

        They bound the error of the residual.
        """
        return max(0, round(sum(self.after.values()) - sum(self.before.values())))

    @property
    def max_residual(self) -> float:
        """Residual if the service got nothing between `before` and the reading of the fleet."""
        return token_account(self.fleet, self.before).residual

    def account(self) -> Account:
        """Return the tokens by use at the moment of `after`.

        The residual holds tokens that were sent and not received. It also holds tokens that were
        received without being sent, beyond the `moved_tokens` that the reading explains.
        """
        fleet = self.fleet
        unknown = round(sum(self.after.values())) - fleet.sent_tokens
        num_late = min(max(0, unknown), self.moved_tokens)
        num_sampled_late = max(0, num_late - fleet.running_tokens)
        at_the_end = replace(
            fleet,
            generated_tokens=fleet.generated_tokens + num_sampled_late,
            running_tokens=fleet.running_tokens + num_sampled_late - num_late,
        )
        return token_account(at_the_end, self.after)
