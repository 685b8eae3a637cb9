"""A file of tokens that changes while a process runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ConfigError
from sluice.security.token_file import (
    GivenToken,
    Role,
    Token,
    TokenFile,
    parse_tokens,
    read_tokens,
    role_of,
    write_private,
)

OLD, NEW = "the-old-token-0123456", "the-new-token-0123456"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def secrets_of(source: TokenFile) -> list[str]:
    return [token.secret for token in source.tokens()]


def test_a_changed_file_counts_a_second_later(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(OLD)
    source = TokenFile(path, "key", clock)
    path.write_text(f"{OLD}\n{NEW}")
    assert secrets_of(source) == [OLD]
    clock.now_s = 1.0
    assert secrets_of(source) == [OLD, NEW]


@pytest.mark.parametrize("content", [None, "", "short", b"\xff\xfe"])
def test_a_file_that_turned_bad_leaves_the_last_tokens_and_is_logged_once(
    content: str | bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(OLD)
    source = TokenFile(path, "key", clock)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for clock.now_s in (1.0, 2.0, 3.0):
        assert secrets_of(source) == [OLD]
    (reported,) = caplog.messages
    assert reported.startswith("the tokens read before stay valid: key = ")


def test_a_file_that_is_replaced_is_read(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text(OLD)
    source = TokenFile(path, "key", clock)
    (tmp_path / "next").write_text(NEW)
    (tmp_path / "next").replace(path)
    clock.now_s = 1.0
    assert secrets_of(source) == [NEW]


def test_a_missing_file_names_its_key_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^key = .*tokens' does not exist; `sluice certs`"):
        read_tokens(tmp_path / "tokens", "key")


def test_a_given_token_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"^SLUICE_TOKEN: a token of 5 characters"):
        GivenToken("short", "SLUICE_TOKEN")


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


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_read_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_private(tmp_path / "certs", {"a": b"1", "b": b"2"}, replace=False)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "certs") == 0o700
    assert {mode_of(file) for file in (tmp_path / "certs").iterdir()} == {0o600}


def test_one_file_that_is_there_keeps_all_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"kept")
    with pytest.raises(ConfigError, match=r"holds b already, .* --out, .* --force"):
        write_private(tmp_path, {"a": b"1", "b": b"2"}, replace=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"b": b"kept"}


def test_a_replaced_file_becomes_private_and_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"kept")
    folder = tmp_path / "certs"
    folder.mkdir()
    (folder / "a").symlink_to(elsewhere)
    write_private(folder, {"a": b"1"}, replace=True)
    assert elsewhere.read_bytes() == b"kept"
    assert (folder / "a").read_bytes() == b"1"
    assert mode_of(folder / "a") == 0o600


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; name another folder"):
        write_private(tmp_path / "file" / "certs", {"a": b"1"}, replace=False)
