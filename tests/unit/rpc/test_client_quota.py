"""What one client may have under way, and who that is."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sluice.errors import ExhaustedError
from sluice.rpc.caller_name import CLIENT_KEY, caller_name
from sluice.rpc.client_quota import ClientQuota
from sluice.security.tokens import Role, Token

CLIENT, OTHER, SERVICE = "c" * 20, "o" * 20, "s" * 20


class Tokens:
    def tokens(self) -> tuple[Token, ...]:
        return (Token(Role.SERVICE, SERVICE), Token(Role.CLIENT, CLIENT), Token(Role.CLIENT, OTHER))


def named(token: str | None, name: str | None, *, with_tokens: bool = True) -> str | None:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    metadata += [(CLIENT_KEY, name)] if name is not None else []
    return caller_name(metadata, Tokens() if with_tokens else None)


def test_a_clients_token_is_its_name_whatever_it_calls_itself() -> None:
    assert named(CLIENT, None) == named(CLIENT, "a") == named(CLIENT, "b")
    assert named(CLIENT, None) != named(OTHER, None)
    assert CLIENT not in str(named(CLIENT, None))


def test_services_and_callers_without_tokens_are_who_they_say_or_nobody() -> None:
    assert named(SERVICE, None) is None
    assert named(SERVICE, "front") == "front"
    assert named(None, None, with_tokens=False) is None
    assert named(None, "eval", with_tokens=False) == "eval"
    assert named(None, "", with_tokens=False) is None
    assert len(str(named(None, "x" * 1000, with_tokens=False))) == 128


def test_a_client_has_at_most_its_quota_and_gets_back_what_ended() -> None:
    quota = ClientQuota(4, "samples", "sluice.limits.max_client_samples")
    with ExitStack() as first:
        first.enter_context(quota.held("a", 3))
        with pytest.raises(ExhaustedError, match=r"client 'a': 3 samples .* 2 more .* allows 4"):
            first.enter_context(quota.held("a", 2))
        with quota.held("a", 1), quota.held("b", 4), quota.held(None, 99):
            assert (quota.in_use("a"), quota.in_use("b"), quota.in_use(None)) == (4, 4, 0)
    assert quota.in_use("a") == 0
    with pytest.raises(ValueError, match="inside"), quota.held("a", 4):
        raise ValueError("inside")
    assert quota.in_use("a") == 0


def test_calls_that_need_nothing_of_a_quota_end_in_any_order() -> None:
    quota = ClientQuota(4, "MiB", "sluice.limits.max_client_images_mb")
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(quota.held("a", 0))
        second.enter_context(quota.held("a", 0))
        first.close()
    with quota.held("a", 4), quota.held("a", 0):
        assert quota.in_use("a") == 4
