"""Bearer tokens: their file and the role of each. Also write files that only the owner can read."""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from sluice.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_CHARACTERS = 16
# RFC 6750, section 2.1: the characters of a bearer token.
_B64TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_LOOK_EVERY_S = 1.0
_OWNER_ONLY, _OWNER_ONLY_FOLDER = 0o600, 0o700


class Role(StrEnum):
    """The rights of a caller; see `sluice.rpc.auth`."""

    CLIENT = "client"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Token:
    """A secret and its role. The secret appears in no repr."""

    role: Role
    secret: str = field(repr=False)


def parse_tokens(text: str, source: str) -> tuple[Token, ...]:
    """Parse a file of tokens.

    Args:
        text: the file's content.
        source: the file's name for errors, which never quote a token.

    Raises:
        ConfigError: a line is no token, a token occurs twice, or there is no token.
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
    """Raise ConfigError, which does not quote `secret`, if it cannot be a bearer token."""
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
    """Return the role of a presented token; None: it is not among `tokens`.

    The comparison covers all tokens and takes the same time wherever they differ.
    """
    presented_bytes = presented.encode(errors="surrogateescape")
    roles = [
        token.role
        for token in tokens
        if hmac.compare_digest(token.secret.encode(), presented_bytes)
    ]
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


class TokenSource(Protocol):
    """A source of tokens."""

    def tokens(self) -> tuple[Token, ...]:
        """Return the tokens valid at this moment, at least one. This process presents the first."""
        ...


class GivenToken:
    """One token that never changes, with the role of a service.

    Raises:
        ConfigError: it cannot be a bearer token; names `source`.
    """

    def __init__(self, secret: str, source: str) -> None:
        check_secret(secret, source)
        self._tokens = (Token(Role.SERVICE, secret),)

    def tokens(self) -> tuple[Token, ...]:
        """Return the one token."""
        return self._tokens


class TokenFile:
    """The tokens in a file, at most a second old. If the file breaks, the last ones stay valid.

    Args:
        path: the file.
        key: the setting's name, for errors.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the file cannot be read, or is no file of tokens.
    """

    def __init__(self, path: Path, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._key = key
        self._clock = clock
        self._looked_s = clock()
        self._stamp = _stamp(path)
        self._tokens = read_tokens(path, key)

    def tokens(self) -> tuple[Token, ...]:
        """Return the tokens in the file."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._reload_if_changed()
        return self._tokens

    def _reload_if_changed(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = read_tokens(self._path, self._key)
        except ConfigError as error:
            logger.warning("the tokens read before stay valid: %s", error)
        else:
            logger.info("%s: tokens read again", self._path)


def read_tokens(path: Path, key: str) -> tuple[Token, ...]:
    """Read a file of tokens once.

    Raises:
        ConfigError: the file cannot be read, or is no file of tokens.
    """
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key} = {str(path)!r} does not exist; `sluice certs` makes one"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(path)!r} cannot be read ({error.strerror}); let this user read it"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key} = {str(path)!r} is not ASCII text") from error
    return parse_tokens(text, f"{key} = {str(path)!r}")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what differs after the file was changed or replaced; None: there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def write_private(folder: Path, files: Mapping[str, bytes], *, replace: bool) -> None:
    """Write `files` by name into `folder`, and make the folder if it is missing.

    Raises:
        ConfigError: a file exists and `replace` is False, or the folder cannot be written. Nothing
            was replaced.
    """
    present = [name for name in files if os.path.lexists(folder / name)]
    if present and not replace:
        raise ConfigError(
            f"{folder} holds {', '.join(present)} already, which a run may use; name another "
            "folder with --out, or replace all of them with --force"
        )
    try:
        folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
        for name, content in files.items():
            _write(folder / f"{name}.{os.getpid()}.partial", content)
        for name in files:
            (folder / f"{name}.{os.getpid()}.partial").replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; name another folder") from error


def _write(path: Path, content: bytes) -> None:
    # A killed process with this number may have left one that others can read.
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, _OWNER_ONLY), "wb") as file:
        file.write(content)
