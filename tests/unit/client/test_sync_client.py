"""The client of synchronous programs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from sluice.client import Client, NewPrompt, RetryPolicy, RunAddress, SampleDelta, SampleFinished
from sluice.errors import ConfigError, PeerError
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
        for _ in range(6000):
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


WAIT_S = 60.0


def prompt(prompt_id: str) -> NewPrompt:
    return NewPrompt(prompt_id, (ChatMessage("user", "2 + 2?"),), "math_dapo", "4")


@pytest.fixture(scope="module")
def address() -> Iterator[RunAddress]:
    with threaded_run(TokenReplica()) as found:
        yield found


def in_own_thread(client: Client, work: Callable[[], object]) -> list[BaseException]:
    """Does the work in the client's thread; what it raised."""
    raised: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            work()
        except ConfigError as error:
            raised.append(error)
        finally:
            done.set()

    client._loop.call_soon_threadsafe(call)
    assert done.wait(WAIT_S)
    return raised


def until_no_thread_reads() -> None:
    for _ in range(6000):
        if "sluice prompts" not in [thread.name for thread in threading.enumerate()]:
            return
        threading.Event().wait(0.01)
    raise AssertionError("a thread still draws prompts")


def test_an_iterable_of_prompts_may_ask_the_client_itself(address: RunAddress) -> None:
    with Client(address, policy=IMPATIENT) as client:

        def prompts() -> Iterator[NewPrompt]:
            yield prompt(f"of {len(client.replicas())} replicas")
            yield prompt(client.generate("text").texts[0])

        reported = [(event.prompt_id, event.event) for event in client.submit(prompts())]
    sent = ["of 1 replicas", "[0][1][2][3][4][5]"]
    assert sorted(reported) == sorted(
        (name, what) for name in sent for what in ("accepted", "trained")
    )
    until_no_thread_reads()


def test_an_iterable_that_waits_keeps_no_other_call_from_its_answer(address: RunAddress) -> None:
    is_read, resume = threading.Event(), threading.Event()

    def prompts() -> Iterator[NewPrompt]:
        is_read.set()
        assert resume.wait(WAIT_S)
        yield prompt("a")

    with Client(address, policy=IMPATIENT) as client:
        reported: list[str] = []
        events = client.submit(prompts())
        thread = threading.Thread(target=lambda: reported.extend(event.event for event in events))
        thread.start()
        assert is_read.wait(WAIT_S)
        assert client.status().step == 2
        resume.set()
        thread.join(WAIT_S)
    assert reported == ["accepted", "trained"]


def test_a_client_is_closed_while_an_iterable_waits(address: RunAddress) -> None:
    is_read, resume = threading.Event(), threading.Event()

    def prompts() -> Iterator[NewPrompt]:
        yield prompt("a")
        is_read.set()
        assert resume.wait(WAIT_S)

    client = Client(address, policy=IMPATIENT)
    events = client.submit(prompts(), until_outcome=False)
    assert next(events).event == "accepted"
    assert is_read.wait(WAIT_S)
    events.close()
    client.close()
    resume.set()
    until_no_thread_reads()


@pytest.mark.parametrize("failure", [ValueError("line 2"), SystemExit(3)])
def test_a_failure_of_an_iterable_in_its_thread_is_the_callers(
    address: RunAddress, failure: BaseException
) -> None:
    def prompts() -> Iterator[NewPrompt]:
        yield prompt("a")
        raise failure

    with Client(address, policy=IMPATIENT) as client:
        with pytest.raises((ValueError, RuntimeError), match=r"line 2|SystemExit: 3"):
            list(client.submit(prompts()))
        assert client.status().step == 2
    until_no_thread_reads()


def test_a_client_that_is_called_in_its_own_thread_says_so(address: RunAddress) -> None:
    with Client(address, policy=IMPATIENT) as client:
        (raised,) = in_own_thread(client, client.replicas)
        assert "it was called in its own thread" in str(raised)
        assert len(client.replicas()) == 1


def test_an_iterator_that_the_client_s_own_thread_collects_ends_its_call() -> None:
    replica = TokenReplica(hangs_after=1)
    with threaded_run(replica) as address, Client(address, policy=IMPATIENT) as client:
        held = [client.stream("text")]
        next(held[0])
        next(held[0])
        assert not in_own_thread(client, lambda: (held.clear(), gc.collect()))
        for _ in range(6000):
            if replica.cancelled.is_set():
                break
            threading.Event().wait(0.01)
        assert replica.cancelled.is_set()
