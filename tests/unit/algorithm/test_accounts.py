"""The accounts of a run add up, whatever happens in what order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.accounting import (
    RECEIVED,
    Account,
    ReplicaCounters,
    fleet_counters,
    run_accounts,
)

ENDS = [name for name in RECEIVED if name != "pending"]
STATES = ("starting", "generating", "idle", "swapping")


@dataclass
class Replica:
    """What happens at one replica."""

    generated: int = 0
    unsent: int = 0
    running: int = 0
    direct_sent: int = 0
    direct_unsent: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    has_left: bool = False

    def counters(self) -> ReplicaCounters:
        wall_s = sum(self.seconds.values())
        known = ReplicaCounters(
            generated_tokens=self.generated,
            unsent_tokens=self.unsent,
            running_tokens=self.running,
            wall_seconds=wall_s,
            seconds_by_state=dict(self.seconds),
            direct_sent_tokens=self.direct_sent,
            direct_unsent_tokens=self.direct_unsent,
        )
        return known.with_running_unsent() if self.has_left else known


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["draw", "send", "send directly", "break off", "break off directly", "leave", "end"]
        ),
        st.integers(0, 3),
        st.integers(0, 50),
        st.sampled_from(ENDS),
        st.sampled_from(STATES),
    ),
    max_size=200,
)


@given(events)
def test_every_generated_token_is_in_exactly_one_category(
    happenings: list[tuple[str, int, int, str, str]],
) -> None:
    """Tokens are sampled, sent or not, and end in any way; each is counted exactly once."""
    replicas = [Replica() for _ in range(4)]
    received = Counter[str]()
    for what, number, size, end, state in happenings:
        replica = replicas[number]
        if what == "end":
            ended = min(size, received["pending"])
            received["pending"] -= ended
            received[end] += ended
        if replica.has_left:
            continue
        replica.seconds[state] += size
        if what == "draw":
            replica.generated += size
            replica.running += size
        elif what == "leave":
            replica.has_left = True
        else:
            moved = min(size, replica.running)
            replica.running -= moved
            if what == "send":
                received["pending"] += moved
            elif what == "send directly":
                replica.direct_sent += moved
            elif what.startswith("break off"):
                replica.unsent += moved
                replica.direct_unsent += moved if what == "break off directly" else 0
            else:
                replica.running += moved
    fleet = fleet_counters(replica.counters() for replica in replicas)
    accounting = run_accounts(fleet, received, {"training": 3.0, "saving": 1.0}, 4.0)
    assert accounting.tokens is not None
    assert accounting.tokens.residual == 0
    assert accounting.tokens.total == sum(replica.generated for replica in replicas)
    assert min(accounting.tokens.parts.values()) >= 0
    assert accounting.tokens.parts["under_way"] == sum(
        r.running for r in replicas if not r.has_left
    )
    direct = sum(replica.direct_sent + replica.direct_unsent for replica in replicas)
    assert accounting.tokens.parts["direct_clients"] == direct
    assert accounting.rollout.residual == pytest.approx(0)
    assert accounting.trainer.residual == 0
    assert fleet.sent_tokens == received.total()


@given(st.sampled_from([*RECEIVED, "unsent", "running", "direct"]), st.integers(1, 100))
def test_a_token_that_one_side_forgets_is_in_the_residual(where: str, forgotten: int) -> None:
    received = dict.fromkeys(RECEIVED, 200.0)
    fleet = ReplicaCounters(
        generated_tokens=len(RECEIVED) * 200 + 600,
        unsent_tokens=200,
        running_tokens=200,
        direct_sent_tokens=200,
    )
    if where == "unsent":
        fleet = replace(fleet, unsent_tokens=200 - forgotten)
    elif where == "running":
        fleet = replace(fleet, running_tokens=200 - forgotten)
    elif where == "direct":
        fleet = replace(fleet, direct_sent_tokens=200 - forgotten)
    else:
        received[where] -= forgotten
    named = run_accounts(fleet, received, {}, 0.0).as_mapping()
    assert named["tokens_residual"] == forgotten
    assert named["tokens_residual_share"] == forgotten / fleet.generated_tokens


def test_what_a_replica_that_left_had_not_sent_counts_as_aborted() -> None:
    fleet = fleet_counters(
        [
            ReplicaCounters(generated_tokens=10, unsent_tokens=1, running_tokens=2),
            ReplicaCounters(
                generated_tokens=20, unsent_tokens=3, running_tokens=4
            ).with_running_unsent(),
            ReplicaCounters(),
        ]
    )
    assert (fleet.generated_tokens, fleet.unsent_tokens, fleet.running_tokens) == (30, 8, 2)
    named = run_accounts(fleet, {"aborted": 5.0, "trained": 15.0}, {}, 0.0).as_mapping()
    assert named["tokens/aborted"] == 13.0
    assert named["tokens/under_way"] == 2.0
    assert named["tokens_residual"] == 0.0


def test_tokens_of_direct_clients_are_a_part_of_their_own_and_not_aborted() -> None:
    fleet = ReplicaCounters(
        generated_tokens=100,
        unsent_tokens=12,
        running_tokens=5,
        direct_sent_tokens=30,
        direct_unsent_tokens=7,
    )
    assert fleet.sent_tokens == 53
    named = run_accounts(fleet, {"trained": 53.0}, {}, 0.0).as_mapping()
    assert named["tokens/direct_clients"] == 37.0
    assert named["tokens/aborted"] == 5.0
    assert named["tokens_residual"] == 0.0


def test_without_the_reward_services_counts_there_is_no_account_of_tokens() -> None:
    named = run_accounts(
        ReplicaCounters(generated_tokens=10), None, {"training": 1.0}, 2.0
    ).as_mapping()
    assert named == {
        "trainer_s/training": 1.0,
        "trainer_wall_s": 2.0,
        "trainer_seconds_residual": 1.0,
        "trainer_seconds_residual_share": 0.5,
        "rollout_wall_s": 0.0,
        "rollout_seconds_residual": 0.0,
        "rollout_seconds_residual_share": 0.0,
    }


@pytest.mark.parametrize(
    ("total", "part", "residual", "share"),
    [(100.0, 90.0, 10.0, 0.1), (100.0, 110.0, -10.0, 0.1), (0.0, 0.0, 0.0, 0.0), (0.0, 5.0, -5, 1)],
)
def test_the_share_of_a_residual_is_its_size_over_the_total(
    total: float, part: float, residual: float, share: float
) -> None:
    account = Account(total, {"a": part})
    assert (account.residual, account.residual_share) == (residual, share)
