"""The tokens of a process: a file that is read again when it changes, or one that was given."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sluice.errors import ConfigError
from sluice.security.tokens import Role, Token, check_secret, parse_tokens

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class TokenSource(Protocol):
    """Where tokens come from."""

    def tokens(self) -> tuple[Token, ...]:
        """The ones that count at this moment, never none; the first is what we present."""
        ...


class GivenToken:
    """One token that never changes, with the role of a service.

    Raises:
        ConfigError: it cannot be a bearer token; `source` says where it came from.
    """

    def __init__(self, secret: str, source: str) -> None:
        check_secret(secret, source)
        self._tokens = (Token(Role.SERVICE, secret),)

    def tokens(self) -> tuple[Token, ...]:
        """The one."""
        return self._tokens


class TokenFile:
    """The tokens in a file, at most a second old. A file that turned bad leaves the last ones.

    Args:
        path: the file.
        key: names the setting in errors.
        clock: seconds, monotonic.

    Raises:
        ConfigError: it cannot be read, or is no file of tokens.
    """

    def __init__(self, path: Path, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._key, self._clock = path, key, clock
        self._looked_s, self._stamp = clock(), _stamp(path)
        self._tokens = read_tokens(path, key)

    def tokens(self) -> tuple[Token, ...]:
        """What the file says."""
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._tokens

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = read_tokens(self._path, self._key)
        except ConfigError as error:
            logger.warning("the tokens read before still count: %s", error)
        else:
            logger.info("%s: tokens read again", self._path)


def read_tokens(path: Path, key: str) -> tuple[Token, ...]:
    """Reads a file of tokens once.

    Raises:
        ConfigError: it cannot be read, or is no file of tokens.
    """
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key} = {str(path)!r} does not exist; `sluice certs` makes one"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(path)!r} cannot be read ({error.strerror}); give this user the right"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key} = {str(path)!r} is no text of ASCII letters") from error
    return parse_tokens(text, f"{key} = {str(path)!r}")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs when the file was changed or replaced; none: it is not there."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size
