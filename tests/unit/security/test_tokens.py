"""Which tokens a file holds, and what a presented one admits to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError
from sluice.security.token_file import Role, Token, parse_tokens, role_of

SECRET = "0123456789abcdef"
OTHER = "fedcba9876543210"
secrets = st.text("abcXYZ019-._~+/", min_size=16, max_size=40)


def test_a_line_is_a_token_or_a_role_and_a_token() -> None:
    text = f"# the run's\n\nservice {SECRET}\n  client   {OTHER}  \n{SECRET}0\n"
    found = [(token.role, token.secret) for token in parse_tokens(text, "tokens")]
    assert found == [
        (Role.SERVICE, SECRET),
        (Role.CLIENT, OTHER),
        (Role.SERVICE, f"{SECRET}0"),
    ]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "tokens holds no token; .*sluice certs"),
        ("# nothing\n", "tokens holds no token"),
        ("short", "tokens, line 1: a token of 5 characters can be guessed; take 16 or more"),
        (f"\nroot {SECRET}", "tokens, line 2: is neither a token nor a role and a token"),
        (f"client {SECRET} x", "tokens, line 1: is neither a token nor a role and a token"),
        (f"{SECRET}é", "tokens, line 1: a token has characters that cannot travel in a header"),
        (f"client {SECRET}\nservice {SECRET}", "tokens holds a token twice"),
    ],
)
def test_what_is_no_file_of_tokens_is_refused_without_quoting_it(text: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=f"^{reported}") as refused:
        parse_tokens(text, "tokens")
    assert SECRET not in str(refused.value)


@given(st.lists(st.tuples(st.sampled_from(Role), secrets), unique_by=lambda pair: pair[1]))
def test_exactly_the_tokens_of_the_file_are_known_each_with_its_role(
    pairs: list[tuple[Role, str]],
) -> None:
    tokens = tuple(Token(role, secret) for role, secret in pairs)
    assert [role_of(tokens, secret) for _, secret in pairs] == [role for role, _ in pairs]
    assert {role_of(tokens, secret[:-1]) for _, secret in pairs} <= {None}


@given(st.text())
def test_whatever_is_presented_is_known_only_if_it_is_a_token(presented: str) -> None:
    found = role_of((Token(Role.CLIENT, SECRET),), presented)
    assert found is (Role.CLIENT if presented == SECRET else None)


def test_the_secret_is_in_no_repr() -> None:
    assert SECRET not in repr(Token(Role.SERVICE, SECRET))
