"""The rendezvous store as torch sees it: the semantics of torch's own stores, over a socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from sluice.errors import DeadlineError, WeightSyncError
from sluice.weights.rendezvous import (
    MAX_KEY_CHARS,
    MAX_VALUE_BYTES,
    EpochStore,
    RendezvousStore,
    stop_server,
)
from tests.support.weight_rendezvous import KEY, link_to, make_spec

_KEYS = st.sampled_from(["a", "b", "c/d"])
_TEXTS = st.sampled_from(["", "0", "12", "ünicode"])
_NUMBERS = st.integers(-5, 5)
_STEPS = st.one_of(
    st.tuples(st.just("set"), _KEYS, _TEXTS),
    st.tuples(st.just("check"), st.lists(_KEYS, min_size=1, max_size=3)),
    st.tuples(st.just("compare_set"), _KEYS, _TEXTS, _TEXTS),
    st.tuples(st.just("delete_key"), _KEYS),
    st.tuples(st.just("count"), st.sampled_from(["n", "m"]), _NUMBERS),
)


@pytest.fixture
def server() -> Iterator[RendezvousStore]:
    with closing(RendezvousStore("127.0.0.1")) as server:
        server.begin(1, KEY)
        yield server


def _store(server: RendezvousStore, **link: Any) -> EpochStore:
    return link_to(server, **link)


def _take(store: Store, step: tuple[Any, ...]) -> object:
    name, *arguments = step
    if name == "count":
        return store.add(*arguments)
    return getattr(store, name)(*arguments)


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(_STEPS, max_size=12))
def test_it_answers_like_torchs_own_store(
    server: RendezvousStore, steps: list[tuple[Any, ...]]
) -> None:
    server.begin(1, KEY)
    ours = _store(server)
    # Through torch's prefix, as process groups use it: C++ calls our methods.
    prefixed, reference = PrefixStore("p", ours), PrefixStore("p", HashStore())
    for step in steps:
        assert _take(prefixed, step) == _take(reference, step), step
    for key in ("a", "b", "c/d", "n", "m"):
        if reference.check([key]):
            assert prefixed.get(key) == reference.get(key)


def test_a_name_whose_first_address_does_not_answer_is_reached_at_its_second(
    server: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: int, *_: object) -> list[tuple[Any, ...]]:
        assert host == "trainer.test"
        addresses = ("127.0.0.2", "127.0.0.1")  # the store listens at the second alone
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    spec = make_spec(server.port, host="trainer.test")
    store = EpochStore(spec, "forming epoch 1", "rollout-0", lambda: None)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_keys_of_one_member_are_seen_by_the_others(server: RendezvousStore) -> None:
    first, second = _store(server), _store(server)
    first.set("a", b"\x00binary\xff")
    assert second.get("a") == b"\x00binary\xff"
    second.wait(["a"], timedelta(seconds=60))


def test_a_copy_for_another_thread_of_torch_outlives_the_call_that_made_it(
    server: RendezvousStore,
) -> None:
    store = _store(server)
    copy = PrefixStore("p", store).clone()  # type: ignore[attr-defined]  # not in the stubs
    copy.set("a", "1")
    assert store.get("p/a") == b"1"


@pytest.mark.parametrize(
    "wait",
    [lambda s: s.get("never"), lambda s: s.wait(["never"], timedelta(seconds=1.0))],
    ids=["get", "wait"],
)
def test_a_key_that_never_comes_ends_the_wait_with_our_error_through_torch(
    server: RendezvousStore, wait: Callable[[Store], object]
) -> None:
    store = _store(server, timeout_s=1.0)
    with pytest.raises(
        DeadlineError, match=r"rollout-0: no answer within 1 s while forming epoch 1"
    ):
        wait(PrefixStore("p", store))


def test_a_reason_to_stop_ends_a_wait_inside_torch(server: RendezvousStore) -> None:
    store = link_to(server, timeout_s=60.0, stop_reason=lambda: "a probe failed")
    with pytest.raises(WeightSyncError, match=r"rollout-0 .*a probe failed, before joining"):
        PrefixStore("p", store).get("never")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("k" * (MAX_KEY_CHARS + 1), b"", "a key of 257 characters; use 1 to 256"),
        ("", b"", "a key of 0 characters"),
        ("a", bytes(MAX_VALUE_BYTES + 1), "a value of 262145 bytes; at most 262144"),
        ("a", bytes(1 << 20), "larger than max"),
    ],
)
def test_keys_and_values_beyond_their_bounds_are_refused_by_name(
    server: RendezvousStore, key: str, value: bytes, named: str
) -> None:
    store = _store(server)
    with pytest.raises(WeightSyncError, match=named):
        store.set(key, value)
    assert not store.check(["a"])


def test_an_answer_too_large_for_one_message_is_refused(server: RendezvousStore) -> None:
    store = _store(server)
    keys = [f"k{index}" for index in range(5)]
    for key in keys:
        store.set(key, bytes(MAX_VALUE_BYTES))
    with pytest.raises(WeightSyncError, match="at most 1048576 may travel"):
        store.wait(keys)


class _EndlessServer:
    """A server that gRPC never stops; `asked` becomes true when somebody waits for it."""

    asked = False

    def stop(self, _grace_s: float) -> _EndlessServer:
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        self.asked = True
        assert timeout_s is not None, "a wait without a deadline"
        return False


def test_a_server_that_grpc_does_not_stop_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    server, threads = _EndlessServer(), ThreadPoolExecutor(1)
    stop_server(server, threads)  # type: ignore[arg-type]
    assert server.asked
    assert "it is left behind" in caplog.text
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(print)
