"""What one client may have under way, and who that is."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.rpc.auth import ClientQuota
from sluice.rpc.metadata import CLIENT_KEY, SERVICE_KEY, caller_of, host_of
from sluice.security.token_file import Role, Token

CLIENT, OTHER, SERVICE = "c" * 20, "o" * 20, "s" * 20


class Tokens:
    def tokens(self) -> tuple[Token, ...]:
        return (Token(Role.SERVICE, SERVICE), Token(Role.CLIENT, CLIENT), Token(Role.CLIENT, OTHER))


def named(
    token: str | None,
    name: str | None,
    *,
    service: str | None = None,
    peer: str = "ipv4:10.0.0.7:4711",
    with_tokens: bool = True,
) -> str | None:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    metadata += [(CLIENT_KEY, name)] if name is not None else []
    metadata += [(SERVICE_KEY, service)] if service is not None else []
    call = SimpleNamespace(invocation_metadata=lambda: metadata, peer=lambda: peer)
    return caller_of(call, Tokens() if with_tokens else None)


def test_a_clients_token_is_its_name_whatever_it_calls_itself() -> None:
    assert named(CLIENT, None) == named(CLIENT, "a") == named(CLIENT, "b")
    assert named(CLIENT, None) != named(OTHER, None)
    assert CLIENT not in str(named(CLIENT, None))


def test_services_and_callers_without_tokens_are_who_they_say() -> None:
    assert named(SERVICE, None) is None
    assert named(SERVICE, "front") == "front"
    assert named(None, "eval", with_tokens=False) == "eval"
    assert len(str(named(None, "x" * 1000, with_tokens=False))) == 128


def test_callers_of_one_host_that_give_no_name_are_one_client() -> None:
    first, second = "ipv4:10.0.0.7:4711", "ipv4:10.0.0.7:4712"
    for name in (None, ""):
        for peer in (first, second):
            assert named(None, name, peer=peer, with_tokens=False) == "host 10.0.0.7"
    assert named(None, None, peer="ipv4:10.0.0.8:4711", with_tokens=False) == "host 10.0.0.8"


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1%eth0"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
        ("", ""),
    ],
)
def test_the_port_of_a_caller_is_no_part_of_who_it_is(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_a_service_of_the_run_is_no_client_and_no_client_with_a_token_becomes_one() -> None:
    assert named(None, None, service="reward", with_tokens=False) is None
    assert named(None, "a", service="reward", with_tokens=False) == "a"
    assert named(CLIENT, None, service="reward") == named(CLIENT, None)


def test_a_client_has_at_most_its_quota_and_gets_back_what_ended() -> None:
    quota = ClientQuota(4, "samples", "sluice.limits.max_client_samples")
    with ExitStack() as first:
        first.enter_context(quota.hold("a", 3))
        with pytest.raises(ExhaustedError, match=r"client 'a': 3 samples .* 2 more .* allows 4"):
            first.enter_context(quota.hold("a", 2))
        with quota.hold("a", 1), quota.hold("b", 4), quota.hold(None, 99):
            assert (quota.in_use("a"), quota.in_use("b"), quota.in_use(None)) == (4, 4, 0)
    assert quota.in_use("a") == 0
    with pytest.raises(ValueError, match="inside"), quota.hold("a", 4):
        raise ValueError("inside")
    assert quota.in_use("a") == 0


def test_waiting_is_no_remedy_for_more_than_a_client_may_ever_have() -> None:
    quota = ClientQuota(4, "samples", "sluice.limits.max_client_samples")
    reported = r"client 'a': 5 samples .* sluice\.limits\.max_client_samples allows 4"
    with pytest.raises(InvalidRequestError, match=reported), quota.hold("a", 5):
        pass
    with quota.hold("a", 4), pytest.raises(InvalidRequestError), quota.hold("a", 5):
        pass
    assert quota.in_use("a") == 0


def test_calls_that_need_nothing_of_a_quota_end_in_any_order() -> None:
    quota = ClientQuota(4, "MiB", "sluice.limits.max_client_images_mb")
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(quota.hold("a", 0))
        second.enter_context(quota.hold("a", 0))
        first.close()
    with quota.hold("a", 4), quota.hold("a", 0):
        assert quota.in_use("a") == 4
