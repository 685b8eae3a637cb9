"""The certificates of a run whose services share a folder: made, and made again before they end."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from sluice.cli.certs import write_certificates
from sluice.errors import ConfigError

__all__ = ["CERTIFICATES", "ensure_certificates", "renew_certificates", "security_settings"]

CERTIFICATES = "certs"
"""Their folder, in the run's."""

_DAYS = 365
_RENEWED_BEFORE = datetime.timedelta(days=30)
_AUTHORITY_KEY = "ca.key"
_SERVICE = {
    "ca_file": "ca.pem",
    "cert_file": "service.pem",
    "key_file": "service.key",
    "token_file": "service.tokens",
}
_CLIENT = ("client.pem", "client.key", "client.token")
_FOR_CLIENTS = "ca.pem, client.pem, client.key and client.token"

_Files = dict[str, bytes | None]
"""Contents by name; None: there is no such file."""


def security_settings(folder: Path) -> list[str]:
    """Overrides (``key=value``) that have all services ask for the certificates of `folder`."""
    return [
        "sluice.security.tls=mtls",
        "sluice.security.server_name=sluice",
        *(f"sluice.security.{key}={folder / name}" for key, name in _SERVICE.items()),
    ]


def ensure_certificates(folder: Path, report: Callable[[str], None]) -> None:
    """Has certificates of one name for all services, since replicas come and go, in `folder`.

    They are made if there are none, and all made again, with their authority and the tokens, if no
    service could start with them: one of a service's files is missing, ca.pem or service.pem has
    ended or is no certificate, or the one did not issue the other. Files of the user's own
    (without client.pem, or of another authority than ours) are never replaced: `say` is told.
    The authority's key is not written, and one that is there is deleted, which `say` is told.

    Raises:
        ConfigError: the folder cannot be read or written, and nothing was replaced; or files have
            to be made, and the package that signs is missing.
    """
    files = _read(folder)
    _delete_authority_key(folder, report, is_users=_is_users(files))
    if all(files[name] is None for name in _SERVICE.values()):
        _make(folder)
        report(f"{folder}: made certificates and tokens; clients take {_FOR_CLIENTS}")
        return
    if (reason := _why_refused(folder, files)) is not None:
        _make_again(folder, files, reason, report)


def renew_certificates(folder: Path, report: Callable[[str], None], *, run_is_active: bool) -> None:
    """Makes all files of `folder` again if services still take them, but not for long.

    That is: a certificate ends within 30 days, or clients' files are missing, ended or of another
    authority. The services of a run that goes on hold those that they began with, so `say` is told
    instead, and so it is for files of the user's own and without the package that reads dates.

    Raises:
        ConfigError: the folder cannot be read or written, and nothing was replaced; or the package
            that signs is missing.
    """
    files = _read(folder)
    if not _can_read_certificates():
        report(
            f"notice: nobody looked whether certificates in {folder} end soon, which needs the "
            "package cryptography; pip install 'sluice[certs]'"
        )
    reason = _why_renewed(folder, files)
    if reason is None:
        return
    if run_is_active:
        report(
            f"notice: {reason}; certificates are not renewed while the run goes on: let it "
            "end, or stop the services and give --anew"
        )
        return
    _make_again(folder, files, reason, report)


def _read(folder: Path) -> _Files:
    files: _Files = {}
    for name in (*_SERVICE.values(), *_CLIENT):
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError:
            files[name] = None
        except OSError as error:
            # Of a network's file system perhaps for a moment: no reason to replace anything.
            raise ConfigError(
                f"{folder / name} cannot be read ({error}), and nothing was replaced; see to it "
                "that this user can read it, then try again"
            ) from error
    return files


def _delete_authority_key(folder: Path, report: Callable[[str], None], *, is_users: bool) -> None:
    """Whatever runs in a service could sign with it."""
    try:
        for file in (folder / _AUTHORITY_KEY, *folder.glob(f"{_AUTHORITY_KEY}.*.partial")):
            if not file.exists():
                continue
            if is_users:
                report(f"notice: {file} signs certificates for whoever reads it; keep it elsewhere")
                continue
            file.unlink()
            report(f"notice: {file} was deleted: no service needs it, and any could sign with it")
    except OSError as error:
        raise ConfigError(
            f"{folder / _AUTHORITY_KEY} cannot be deleted ({error}); no service may read it: "
            "delete it yourself"
        ) from error


def _make(folder: Path) -> None:
    write_certificates(folder, [], _DAYS, replace=True, with_authority_key=False)


def _make_again(folder: Path, files: _Files, reason: str, report: Callable[[str], None]) -> None:
    if _is_users(files):
        report(
            f"notice: {reason}; files in {folder} that are not all prepare's are not replaced: "
            "mend them, or delete the folder to have others made"
        )
        return
    _make(folder)
    report(
        f"notice: {reason}; certificates and tokens in {folder} were made again: start "
        f"services again that run, and give clients {_FOR_CLIENTS}"
    )


def _is_users(files: _Files) -> bool:
    """Whether they cannot be `write_certificates`', which writes client.pem before the others."""
    if all(files[name] is None for name in _SERVICE.values()):
        return False
    return files["client.pem"] is None or _is_foreign(files)


def _is_foreign(files: _Files) -> bool:
    if not _can_read_certificates():
        return False
    from sluice.security.development_ca import is_of_a_development_ca

    for pem in (files["ca.pem"], files["service.pem"]):
        try:
            if pem is not None and not is_of_a_development_ca(pem):
                return True
        except ValueError:
            continue  # told where dates are read
    return False


def _why_refused(folder: Path, files: _Files) -> str | None:
    """Why no service could start with the files; None if they can, as far as can be told."""
    missing = [name for name in _SERVICE.values() if files[name] is None]
    if missing:
        return f"{folder} has no {', '.join(missing)}"
    service = _why_of_no_use(folder, files, ("ca.pem", "service.pem"), datetime.timedelta())
    # An authority of the user's may have others between itself and the service.
    return service or (None if _is_foreign(files) else _why_strange(folder, files, "service.pem"))


def _why_renewed(folder: Path, files: _Files) -> str | None:
    missing = [name for name in _CLIENT if files[name] is None]
    if missing:
        return f"{folder} has no {', '.join(missing)}, which clients take"
    names = ("ca.pem", "service.pem", "client.pem")
    soon = _why_of_no_use(folder, files, names, _RENEWED_BEFORE)
    return soon or (None if _is_foreign(files) else _why_strange(folder, files, "client.pem"))


def _why_of_no_use(
    folder: Path, files: _Files, names: tuple[str, ...], needed: datetime.timedelta
) -> str | None:
    """The first of `names` that is no certificate, or is valid for no longer than `needed`."""
    if not _can_read_certificates():
        return None
    from sluice.security.development_ca import end_of_validity

    now = datetime.datetime.now(datetime.UTC)
    for name in names:
        try:
            end = end_of_validity(files[name] or b"")
        except ValueError as error:
            return f"{folder / name} is no certificate ({error})"
        if end - now <= needed:
            verb = "was valid" if end <= now else "is valid"
            return f"{folder / name} {verb} until {end:%F %R} UTC"
    return None


def _why_strange(folder: Path, files: _Files, name: str) -> str | None:
    """Files that were replaced in part are of two authorities."""
    if not _can_read_certificates():
        return None
    from sluice.security.development_ca import was_issued_by

    if was_issued_by(files[name] or b"", files["ca.pem"] or b""):
        return None
    return f"{folder / name} was not issued by ca.pem"


def _can_read_certificates() -> bool:
    return find_spec("cryptography") is not None
