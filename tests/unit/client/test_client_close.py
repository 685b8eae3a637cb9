"""Closing a synchronous client ends what other threads wait for."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from sluice.client import Client, RetryPolicy, RunAddress
from sluice.errors import SluiceError
from tests.support.threaded_run import threaded_run
from tests.support.token_replica import TokenReplica

PATIENT = RetryPolicy(first_s=600.0, most_s=600.0, patience_s=3600.0)


@pytest.mark.parametrize("waits_for", ["tokens", "another try"])
def test_a_closed_client_ends_the_calls_of_other_threads(waits_for: str) -> None:
    replica = TokenReplica(hangs_after=0) if waits_for == "tokens" else TokenReplica(breaks_after=0)
    ended: list[BaseException] = []
    with threaded_run(replica) as address:
        client = Client(address, policy=PATIENT)

        def generate() -> None:
            try:
                client.generate("text")
            except (CancelledError, SluiceError) as error:
                ended.append(error)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        for _ in range(2000):
            if replica.requests:
                break
            threading.Event().wait(0.01)
        client.close()
        thread.join(20)
        assert not thread.is_alive()
    assert len(ended) == 1


def test_a_closed_client_says_so() -> None:
    client = Client(RunAddress())
    client.close()
    with pytest.raises(SluiceError, match="client: it is closed"):
        client.generate("text")
