"""`sluice certs`, and the certificates of a prepared run: make them, and renew them before they
end.
"""

from __future__ import annotations

import datetime
import secrets
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sluice.config.addresses import split_host_port
from sluice.errors import ConfigError
from sluice.security.token_file import write_private

_TOKEN_BYTES = 32
_LONGEST_VALIDITY_DAYS = 3650


def certs(
    *,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address where services are found; may be repeated."),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=_LONGEST_VALIDITY_DAYS, help="Days of validity.")
    ] = 365,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files of an earlier call, all of them.")
    ] = False,
) -> None:
    """Make a development CA, certificates for services and clients, and bearer tokens.

    Prints the lines for the run's configuration. Anybody with a key or token file can call the
    services, so all files are readable by you alone. For production use your own CA's certificates.

    \b
    Examples:
      sluice certs
      sluice certs --out certs --host trainer.lab --host 10.0.0.5 --days 90
    """
    hosts = host or []
    folder = write_certificates(out, hosts, days, replace=force)
    typer.echo(_configuration(folder, name_is_fixed=not hosts))
    typer.echo(_for_clients(folder))


def write_certificates(
    out: Path, hosts: list[str], days: int, *, replace: bool, with_authority_key: bool = True
) -> Path:
    """Writes all files; returns their folder.

    Without `with_authority_key` the authority's key is never written, and nobody can sign with it.
    A process that is killed meanwhile leaves client.pem or service.pem of another authority than
    ca.pem, or none of either, so that one who looks can tell.

    Raises:
        ConfigError: a host is none, files are there and not to be replaced, or the package that
            signs is missing.
    """
    files = _contents(_checked(hosts), days)
    if not with_authority_key:
        del files["ca.key"]
    folder = out.absolute()
    write_private(folder, files, replace=replace)
    return folder


def _checked(hosts: list[str]) -> list[str]:
    names = []
    for given in hosts:
        name, port = split_host_port(given)
        if port is not None or not name.isascii() or not name.isprintable() or " " in name:
            raise ConfigError(
                f"--host {given!r} is no name or address; write it without a port, as trainer.lab"
            )
        names.append(name)
    return names


def _contents(hosts: list[str], days: int) -> dict[str, bytes]:
    try:
        from sluice.security.development_ca import LOCAL_NAMES, DevelopmentCa
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"sluice certs needs the package {error.name}; pip install 'sluice[certs]'"
        ) from error
    authority = DevelopmentCa(days)
    service = authority.service(tuple(dict.fromkeys((*LOCAL_NAMES, *hosts))), days)
    client = authority.client(days)
    for_service, for_client = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(2))
    # They are replaced in this order: see `write_certificates`.
    return {
        "client.pem": client.certificate,
        "ca.pem": authority.itself.certificate,
        "ca.key": authority.itself.key,
        "client.key": client.key,
        "client.token": f"client {for_client}\n".encode(),
        "service.key": service.key,
        "service.tokens": f"service {for_service}\nclient {for_client}\n".encode(),
        "service.pem": service.certificate,
    }


def _configuration(folder: Path, *, name_is_fixed: bool) -> str:
    name = "\n    server_name: sluice" if name_is_fixed else ""
    return f"""wrote {folder}; for the configuration of the run:

sluice:
  security:
    tls: mtls
    ca_file: {folder / "ca.pem"}
    cert_file: {folder / "service.pem"}
    key_file: {folder / "service.key"}
    token_file: {folder / "service.tokens"}{name}
"""


def _quoted(path: Path) -> str:
    """As a shell reads it."""
    return shlex.quote(str(path))


def _for_clients(folder: Path) -> str:
    return f"""for clients, who may submit, generate and look; they need no other files:

export SLUICE_CA_FILE={_quoted(folder / "ca.pem")}
export SLUICE_CERT_FILE={_quoted(folder / "client.pem")}
export SLUICE_KEY_FILE={_quoted(folder / "client.key")}
export SLUICE_TOKEN_FILE={_quoted(folder / "client.token")}

ca.key signs further certificates; no service needs it, so keep it elsewhere or delete it"""


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
    from sluice.security.certificates import ends_of_validity

    now = datetime.datetime.now(datetime.UTC)
    for name in names:
        try:
            end = ends_of_validity(files[name] or b"")[0]
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
