"""`sluice certs`, and the certificates of a prepared run: make them, and renew them in time."""

from __future__ import annotations

import datetime
import secrets
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import AsJson
from sluice.cli.terminal import print_json
from sluice.config.addresses import split_host_port
from sluice.errors import ConfigError
from sluice.security.token_file import write_private

_TOKEN_BYTES = 32
_LONGEST_VALIDITY_DAYS = 3650
CERTIFICATES = "certs"
"""The folder of a run's certificates, in the run's folder."""
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
"""Contents by name; None: the file does not exist."""


def certs(
    *,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of services; repeatable."),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=_LONGEST_VALIDITY_DAYS, help="Days of validity.")
    ] = 365,
    force: Annotated[
        bool, typer.Option("--force", help="Replace all files of an earlier call.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a development CA, certificates for services and clients, and bearer tokens.

    Prints the lines for the run's configuration. A key or token file is enough to call the
    services, so only you can read the files. For production use certificates of your own CA.

    \b
    Examples:
      sluice certs
      sluice certs --out certs --host trainer.lab --host 10.0.0.5 --days 90
    """
    hosts = host or []
    folder = write_certificates(out, hosts, days, replace=force)
    if as_json:
        files = sorted(file.name for file in folder.iterdir())
        print_json({"folder": str(folder), "files": files})
        return
    typer.echo(_configuration(folder, name_is_fixed=not hosts))
    typer.echo(_for_clients(folder))


def write_certificates(
    out: Path, hosts: list[str], days: int, *, replace: bool, with_authority_key: bool = True
) -> Path:
    """Write all files; return their folder.

    Without `with_authority_key` the authority's key is never written, and nothing can sign with
    it. A process that is killed meanwhile leaves client.pem or service.pem of another authority
    than ca.pem, or leaves one out: the next call detects that.

    Raises:
        ConfigError: a host is not a name, files exist and must not be replaced, or the package
            that signs is missing.
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
                f"--host {given!r} is not a name or address; write it without a port, "
                "such as trainer.lab"
            )
        names.append(name)
    return names


def need_cryptography() -> None:
    """Raise ConfigError if the package that signs and reads certificates is missing."""
    try:
        import cryptography  # noqa: F401 - whether it is installed
    except ModuleNotFoundError as error:
        raise ConfigError(
            "certificates need the package cryptography; pip install 'sluice[certs]'"
        ) from error


def _contents(hosts: list[str], days: int) -> dict[str, bytes]:
    need_cryptography()
    from sluice.security.development_ca import LOCAL_NAMES, DevelopmentCa

    authority = DevelopmentCa(days)
    service = authority.service(tuple(dict.fromkeys((*LOCAL_NAMES, *hosts))), days)
    client = authority.client(days)
    for_service, for_client = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(2))
    # For the order of replacement see `write_certificates`.
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


def _for_clients(folder: Path) -> str:
    files = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key", "TOKEN": "client.token"}
    lines = "\n".join(
        f"export SLUICE_{kind}_FILE={shlex.quote(str(folder / name))}"
        for kind, name in files.items()
    )
    return f"""for clients, which may submit, generate and look; they need no other files:

{lines}

ca.key signs further certificates; no service needs it, so keep it elsewhere or delete it"""


def security_settings(folder: Path) -> list[str]:
    """Return overrides (``key=value``) that make services require certificates of `folder`."""
    return [
        "sluice.security.tls=mtls",
        "sluice.security.server_name=sluice",
        *(f"sluice.security.{key}={folder / name}" for key, name in _SERVICE.items()),
    ]


def ensure_certificates(folder: Path, report: Callable[[str], None]) -> None:
    """Make certificates for all services in `folder`, unless usable ones are there.

    All services share one name, because replicas come and go. All files, with the authority and
    the tokens, are made again if no service could start with them: a file is missing, ca.pem or
    service.pem has expired or is not a certificate, or ca.pem did not issue service.pem. Files of
    the user (without client.pem, or of another authority than ours) are never replaced; a notice
    names the problem. The authority's key is not written, and an existing one is deleted.

    Args:
        folder: the folder of the files.
        report: called with each notice.

    Raises:
        ConfigError: the folder cannot be read or written, and nothing was replaced; or the package
            that signs is missing.
    """
    need_cryptography()
    files = _read(folder)
    _delete_authority_key(folder, report, is_users=_is_users(files))
    if all(files[name] is None for name in _SERVICE.values()):
        write_certificates(folder, [], _DAYS, replace=True, with_authority_key=False)
        report(f"{folder}: made certificates and tokens; clients need {_FOR_CLIENTS}")
        return
    certificates, now = ("ca.pem", "service.pem"), datetime.timedelta()
    if (reason := _fault(folder, files, _SERVICE.values(), certificates, now)) is not None:
        _make_again(folder, files, reason, report)


def renew_certificates(folder: Path, report: Callable[[str], None], *, run_is_active: bool) -> None:
    """Make all files of `folder` again if they are usable, but not for long.

    That is: a certificate expires within 30 days, or clients' files are missing, expired or of
    another authority. The services of an active run hold the files that they began with: then, and
    for files of the user, a notice is all.

    Args:
        folder: the folder of the files.
        report: called with each notice.
        run_is_active: whether a run uses the files.

    Raises:
        ConfigError: the folder cannot be read or written, and nothing was replaced.
    """
    files = _read(folder)
    certificates = ("ca.pem", "service.pem", "client.pem")
    reason = _fault(folder, files, _CLIENT, certificates, _RENEWED_BEFORE)
    if reason is None:
        return
    if run_is_active:
        report(
            f"notice: {reason}; certificates are not renewed while the run is active: let it "
            "end, or stop the services and give --restart"
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
            # A network file system may fail for a moment: no reason to replace anything.
            raise ConfigError(
                f"{folder / name} cannot be read ({error}), and nothing was replaced; make it "
                "readable for this user, then try again"
            ) from error
    return files


def _delete_authority_key(folder: Path, report: Callable[[str], None], *, is_users: bool) -> None:
    """Delete the authority's key: any code in a service could sign with it."""
    try:
        for file in (folder / _AUTHORITY_KEY, *folder.glob(f"{_AUTHORITY_KEY}.*.partial")):
            if not file.exists():
                continue
            if is_users:
                report(
                    f"notice: {file} signs certificates for anyone who reads it; keep it elsewhere"
                )
                continue
            file.unlink()
            report(
                f"notice: {file} was deleted: no service needs it, and any code in it could sign"
            )
    except OSError as error:
        raise ConfigError(
            f"{folder / _AUTHORITY_KEY} cannot be deleted ({error}); no service may read it: "
            "delete it yourself"
        ) from error


def _make_again(folder: Path, files: _Files, reason: str, report: Callable[[str], None]) -> None:
    if _is_users(files):
        report(
            f"notice: {reason}; files in {folder} that prepare did not make are not replaced: "
            "correct them, or delete the folder to have others made"
        )
        return
    write_certificates(folder, [], _DAYS, replace=True, with_authority_key=False)
    report(
        f"notice: {reason}; certificates and tokens in {folder} were made again: restart "
        f"running services, and give clients {_FOR_CLIENTS}"
    )


def _is_users(files: _Files) -> bool:
    """Return whether the user made them: `write_certificates` writes client.pem first."""
    if all(files[name] is None for name in _SERVICE.values()):
        return False
    return files["client.pem"] is None or _is_foreign(files)


def _is_foreign(files: _Files) -> bool:
    from sluice.security.development_ca import is_of_a_development_ca

    for pem in (files["ca.pem"], files["service.pem"]):
        try:
            if pem is not None and not is_of_a_development_ca(pem):
                return True
        except ValueError:
            continue  # reported where dates are read
    return False


def _fault(
    folder: Path,
    files: _Files,
    needed: Iterable[str],
    certificates: tuple[str, ...],
    validity: datetime.timedelta,
) -> str | None:
    """Return the first fault of the files; None: no fault was found.

    Args:
        folder: for the text.
        files: contents of all files.
        needed: names of files that must exist.
        certificates: names of those that must be valid for longer than `validity`; ca.pem must
            have issued the last one, unless the files are of another authority than ours, which may
            have others between itself and the service.
        validity: see above.
    """
    missing = [name for name in needed if files[name] is None]
    if missing:
        return f"{folder} has no {', '.join(missing)}"
    from sluice.security.certificates import ends_of_validity
    from sluice.security.development_ca import was_issued_by

    now = datetime.datetime.now(datetime.UTC)
    for name in certificates:
        try:
            end = ends_of_validity(files[name] or b"")[0]
        except ValueError as error:
            return f"{folder / name} is not a certificate ({error})"
        if end - now <= validity:
            verb = "was valid" if end <= now else "is valid"
            return f"{folder / name} {verb} until {end:%F %R} UTC"
    issued = certificates[-1]
    if _is_foreign(files) or was_issued_by(files[issued] or b"", files["ca.pem"] or b""):
        return None
    return f"{folder / issued} was not issued by ca.pem"
