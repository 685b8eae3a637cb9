"""Bearer tokens: what a file of them says, and which role a presented one has.

A line is a token, or a role and a token; empty lines and those that start with # count for nothing.
A process accepts every token of its file and presents the first, so a token is replaced by adding
the new one below the old, then exchanging the two, then taking the old one out.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.errors import ConfigError

MIN_CHARACTERS = 16
# RFC 6750, section 2.1: the characters of a bearer token.
_B64TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class Role(StrEnum):
    """What a caller may do; see `sluice.rpc.method_roles`."""

    CLIENT = "client"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Token:
    """A secret and what it admits to. The secret appears in no repr."""

    role: Role
    secret: str = field(repr=False)


def parse_tokens(text: str, source: str) -> tuple[Token, ...]:
    """Reads a file of tokens.

    Args:
        source: names the file in errors, which never quote a token.

    Raises:
        ConfigError: a line is no token, a token is there twice, or there is none.
    """
    tokens: list[Token] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            tokens.append(_parse_line(words, f"{source}, line {number}"))
    if not tokens:
        raise ConfigError(f"{source} holds no token; write one a line, or let `sluice certs` do it")
    if len({token.secret for token in tokens}) < len(tokens):
        raise ConfigError(f"{source} holds a token twice; take one of the lines out")
    return tuple(tokens)


def check_secret(secret: str, source: str) -> None:
    """Raises ConfigError if `secret` cannot be a bearer token, without quoting it."""
    if len(secret) < MIN_CHARACTERS:
        raise ConfigError(
            f"{source}: a token of {len(secret)} characters can be guessed; take {MIN_CHARACTERS} "
            "or more, as from `openssl rand -hex 32`"
        )
    if not _B64TOKEN.fullmatch(secret):
        raise ConfigError(
            f"{source}: a token has characters that cannot travel in a header; use letters, "
            "digits and - . _ ~ + /"
        )


def role_of(tokens: Sequence[Token], presented: str) -> Role | None:
    """The role of a presented token; none: it is not among `tokens`.

    Compares with all of them, each in a time that does not depend on where they differ.
    """
    given = presented.encode(errors="surrogateescape")
    roles = [token.role for token in tokens if hmac.compare_digest(token.secret.encode(), given)]
    return roles[0] if roles else None


def _parse_line(words: list[str], place: str) -> Token:
    role, secret = (Role.SERVICE.value, words[0]) if len(words) == 1 else (words[0], words[1])
    if len(words) > 2 or role not in set(Role):
        raise ConfigError(
            f"{place}: is neither a token nor a role and a token; write `client TOKEN` or "
            "`service TOKEN`"
        )
    check_secret(secret, place)
    return Token(Role(role), secret)
