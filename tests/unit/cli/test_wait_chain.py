"""The service that holds up a run, found from the waits of all services."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sluice.cli.watch.status import wait_table
from sluice.client.wait_chain import FLEET, REWARD, TRAINER, ServiceWaits, explain
from sluice.concurrency.waits import Waiting

LATE = "no answer within 2 s"


def trainer(*waits: Waiting, **more: object) -> ServiceWaits:
    return ServiceWaits(TRAINER, waits, **more)  # type: ignore[arg-type]


def reward(*waits: Waiting, **more: object) -> ServiceWaits:
    return ServiceWaits(REWARD, waits, **more)  # type: ignore[arg-type]


def replica(number: int, *waits: Waiting, **more: object) -> ServiceWaits:
    return ServiceWaits(f"rollout-{number}", waits, is_replica=True, **more)  # type: ignore[arg-type]


FOR_BATCH = Waiting(REWARD, "filling a batch", 40.0)


def test_the_silent_replica_that_others_wait_for_is_the_root() -> None:
    found = explain(
        [
            trainer(FOR_BATCH),
            reward(
                Waiting("rollout-1", "generating", 34.0, 12),
                Waiting("rollout-0", "generating", 1.0),
            ),
            replica(0),
            replica(1, failure=LATE, pid=4711, process="stopped by a signal"),
        ]
    )
    assert found.root == "rollout-1"
    assert found.cause == (
        "rollout-1 has not answered for 34 s (its process 4711 is stopped by a signal); "
        "12 waits of reward service are waiting for it (generating, 34 s)"
    )
    names = [service.name for service in found.services]
    assert names == ["rollout-1", REWARD, TRAINER, "rollout-0"]


def test_of_two_silent_services_it_is_the_one_that_more_waits_lead_to() -> None:
    found = explain(
        [
            trainer(FOR_BATCH),
            reward(
                Waiting("rollout-1", "generating", 9.0, 3), Waiting("rollout-0", "generating", 9.0)
            ),
            replica(0, failure=LATE),
            replica(1, failure=LATE),
        ]
    )
    assert found.root == "rollout-1"
    assert found.cause.endswith("also no answer from rollout-0")


def test_a_wait_for_the_fleet_leads_to_the_replica_that_is_silent() -> None:
    found = explain(
        [
            trainer(FOR_BATCH),
            reward(Waiting(FLEET, "registering a replica", 20.0)),
            replica(0, failure="no answer", pid=7, process="gone"),
        ]
    )
    assert found.root == "rollout-0"
    assert "rollout-0 does not answer (its process 7 is gone)" in found.cause
    assert f"reward service is waiting for the {FLEET} (registering a replica, 20 s)" in found.cause


def test_silence_lasts_since_the_last_heartbeat_where_nobody_waits_longer() -> None:
    found = explain(
        [
            trainer(Waiting("rollout-0", "staging version 7", 3.0)),
            replica(0, failure=LATE, unheard_s=5),
        ]
    )
    assert found.cause.startswith("rollout-0 has not answered for 5 s; trainer is waiting for it")


def test_a_service_that_refuses_the_caller_is_the_cause_and_not_silent() -> None:
    reported = "trainer: refused while reporting what it waits for: the bearer token is unknown"
    found = explain(
        [
            trainer(failure=reported, is_refused=True),
            reward(Waiting("rollout-0", "generating", 9.0, 3), failure="x", is_refused=True),
            replica(0, failure=LATE),
        ]
    )
    assert found.root == TRAINER
    assert found.cause == f"{reported}; also refused by {REWARD}"


def test_while_all_answer_the_longest_chain_is_followed_to_its_end() -> None:
    found = explain(
        [
            trainer(FOR_BATCH, Waiting("rollout-0", "staging version 7", 2.0)),
            reward(Waiting("scorer process", "grading", 39.0), Waiting(FLEET, "generating", 38.0)),
            replica(0, Waiting("torch engine", "ending a step", 30.0)),
        ]
    )
    assert found.root == "rollout-0"
    assert found.cause == (
        "trainer waits for reward service (filling a batch, 40 s), which waits for rollout-0 "
        "(generating, 38 s), which waits for torch engine (ending a step, 30 s)"
    )


def test_a_chain_ends_at_work_or_at_work_that_stands_still() -> None:
    at_work, still = trainer(FOR_BATCH), reward(still_s=25.0)
    assert explain([at_work, reward()]).cause.endswith("40 s), which is working")
    assert explain([at_work, still]).cause.endswith("which has made no progress for 25 s")


def test_of_a_fleet_that_answers_it_is_whom_most_waits_are_for() -> None:
    waits = [Waiting(FLEET, "generating", 9.0), Waiting("rollout-0", "generating", 8.0, 7)]
    assert explain([reward(*waits), replica(0), replica(1)]).root == "rollout-0"


def test_of_services_that_wait_for_each_other_each_is_named_once() -> None:
    found = explain([trainer(FOR_BATCH), reward(Waiting(TRAINER, "announcing a policy", 39.0))])
    assert found.root == REWARD


def test_waits_of_a_moment_are_no_news() -> None:
    found = explain([trainer(Waiting(REWARD, "filling a batch", 0.2)), reward()])
    assert (found.root, found.cause) == (None, "every service answers, and none waits for another")


PEERS = st.sampled_from([TRAINER, REWARD, FLEET, "rollout-0", "rollout-1", "scorer pool"])
WAITS = st.lists(st.builds(Waiting, PEERS, st.just("x"), st.floats(0, 1e4), st.integers(1, 9)))
SERVICES = st.lists(
    st.builds(
        ServiceWaits,
        st.sampled_from([TRAINER, REWARD, "rollout-0", "rollout-1"]),
        WAITS.map(tuple),
        failure=st.sampled_from(["", LATE]),
    ),
    unique_by=lambda service: service.name,
)


@given(SERVICES)
def test_every_service_is_shown_once_and_a_silent_one_is_the_root_if_there_is_any(
    services: list[ServiceWaits],
) -> None:
    found = explain(services)
    assert sorted(s.name for s in found.services) == sorted(s.name for s in services)
    assert found.root is None or found.services[0].name == found.root
    if any(service.failure for service in services):
        assert found.services[0].failure
    assert json.dumps(asdict(found))


@pytest.fixture
def shown() -> str:
    waits = tuple(Waiting("rollout-1", f"staging version {i}", 50.0 - i) for i in range(12))
    found = explain(
        [
            reward(*waits, Waiting("disk", "committing", 0.1), still_s=31.0),
            replica(1, failure=LATE, pid=4711, process="stopped by a signal", unheard_s=34.2),
        ]
    )
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(wait_table(found))
    return console.export_text()


def test_the_table_begins_with_the_cause_and_its_row_says_what_the_process_is(shown: str) -> None:
    lines = shown.splitlines()
    assert lines[0].startswith("rollout-1 has not answered for 50 s")
    assert any(line.split() == ["service", "waits", "for", "phase", "since"] for line in lines)
    assert any(
        line.startswith("rollout-1") and f"{LATE}; process 4711 is stopped by a signal" in line
        for line in lines
    )


def test_the_table_is_bounded_and_leaves_out_moments(shown: str) -> None:
    assert "4 more; all of them with --json" in shown
    assert "no progress although it has work" in shown
    assert "committing" not in shown
