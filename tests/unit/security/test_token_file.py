"""A file of tokens that changes while a process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.security.token_file import GivenToken, TokenFile, read_tokens

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
def test_a_file_that_turned_bad_leaves_the_last_tokens_and_is_told_once(
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
