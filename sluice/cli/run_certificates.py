"""The certificates of a run whose services share a folder: made, and made again before they end."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.cli.certs import write_certificates
from sluice.errors import ConfigError

__all__ = ["CERTIFICATES", "ensure_certificates", "security_settings"]

CERTIFICATES = "certs"
"""Their folder, in the run's."""

_DAYS = 365
_RENEWED_BEFORE = datetime.timedelta(days=30)
_NONE_LEFT = datetime.timedelta()
_AUTHORITY_KEY = "ca.key"
_CERTIFICATES_IN_USE = ("ca.pem", "service.pem", "client.pem")
_SERVICE = {
    "ca_file": "ca.pem",
    "cert_file": "service.pem",
    "key_file": "service.key",
    "token_file": "service.tokens",
}


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why certificates have to be made again, and whether services refuse them already."""

    reason: str
    is_fatal: bool


def security_settings(folder: Path) -> list[str]:
    """Overrides (``key=value``) that have all services ask for the certificates of `folder`."""
    return [
        "sluice.security.tls=mtls",
        "sluice.security.server_name=sluice",
        *(f"sluice.security.{key}={folder / name}" for key, name in _SERVICE.items()),
    ]


def ensure_certificates(folder: Path, say: Callable[[str], None], *, run_goes_on: bool) -> None:
    """Has certificates of one name for all services, since replicas come and go, in `folder`.

    They are made if there are none, and all made again, with their authority and the tokens, if one
    of them ends within 30 days, has ended or cannot be read. The services of a run that goes on
    hold those that they began with: while these are valid `say` is told instead. The authority's
    key is never left in the folder, where whatever runs in a service could sign with it.

    Raises:
        ConfigError: the folder cannot be written, or the package that signs is missing.
    """
    (folder / _AUTHORITY_KEY).unlink(missing_ok=True)
    if not (folder / "service.pem").is_file():
        _make(folder)
        return
    fault = _fault(folder)
    if fault is None:
        return
    if run_goes_on and not fault.is_fatal:
        say(
            f"notice: {fault.reason}; certificates are not renewed while the run goes on: let it "
            "end, or stop the services and give --anew"
        )
        return
    _make(folder)
    say(
        f"notice: {fault.reason}; certificates and tokens in {folder} were made again: start "
        "services again that run, and give clients ca.pem, client.pem, client.key and client.token"
    )


def _make(folder: Path) -> None:
    try:
        write_certificates(folder, [], _DAYS, replace=True)
    finally:
        (folder / _AUTHORITY_KEY).unlink(missing_ok=True)


def _fault(folder: Path) -> _Fault | None:
    """Why the certificates cannot stay; None if they can."""
    try:
        from sluice.security.development_ca import end_of_validity
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--secure needs the package {error.name}; pip install 'sluice[certs]'"
        ) from error
    left = []
    now = datetime.datetime.now(datetime.UTC)
    for file in (folder / name for name in _CERTIFICATES_IN_USE):
        try:
            left.append((end_of_validity(file.read_bytes()) - now, file))
        except (OSError, ValueError) as error:
            return _Fault(f"{file} cannot be read ({error})", is_fatal=True)
    shortest, file = min(left)
    if shortest > _RENEWED_BEFORE:
        return None
    has_ended = shortest <= _NONE_LEFT
    verb = "was valid" if has_ended else "is valid"
    return _Fault(f"{file} {verb} until {now + shortest:%F %R} UTC", is_fatal=has_ended)
