"""The client of synchronous programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from sluice.client import Client, NewPrompt, RetryPolicy, RunAddress, SampleDelta, SampleFinished
from sluice.errors import PeerError
from sluice.types import ChatMessage
from tests.support.threaded_run import threaded_run
from tests.support.token_replica import TokenReplica

IMPATIENT = RetryPolicy(first_s=0.01, patience_s=0.0)


@contextmanager
def run_of(replica: TokenReplica) -> Iterator[Client]:
    """A client of a scripted run."""
    with threaded_run(replica) as address, Client(address, policy=IMPATIENT) as client:
        yield client


def test_everything_an_asynchronous_client_does() -> None:
    with run_of(TokenReplica()) as client:
        assert client.generate("text").rollouts[0].num_tokens == 6
        events = list(client.stream("text"))
        assert sum(isinstance(event, SampleDelta) for event in events) == 6
        assert isinstance(events[-1], SampleFinished)
        turn = (ChatMessage("user", "2 + 2?"),)
        reported = list(client.submit([NewPrompt("a", turn, "math_dapo", "4")]))
        assert [(event.event, event.step) for event in reported] == [
            ("accepted", None),
            ("trained", 1),
        ]
        assert client.status().step == 2
        assert [step for step, _ in client.steps(1)] == [1, 2]
    client.close()


def test_a_closed_iterator_ends_its_call_at_the_replica() -> None:
    replica = TokenReplica(hangs_after=1)
    with run_of(replica) as client:
        with closing(client.stream("text")) as events:
            assert isinstance(next(iter(events)), object)
            next(events)
        for _ in range(2000):
            if replica.cancelled.is_set():
                break
            threading.Event().wait(0.01)
        assert replica.cancelled.is_set()


def test_errors_are_those_of_the_asynchronous_client_and_leave_no_thread() -> None:
    with (
        Client(RunAddress(reward="127.0.0.1:1"), policy=IMPATIENT) as client,
        pytest.raises(PeerError, match=r"127\.0\.0\.1:1"),
    ):
        list(client.submit([NewPrompt("a", (ChatMessage("user", "?"),), "math_dapo", "4")]))
    assert "sluice client" not in [thread.name for thread in threading.enumerate()]
