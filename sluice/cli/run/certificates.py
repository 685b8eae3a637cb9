"""`sluice certs`, and the certificates of a prepared run: make them, and renew them in time."""

from __future__ import annotations

import datetime
import secrets
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import AsJson
from sluice.cli.terminal import print_json
from sluice.config.addresses import split_host_port
from sluice.config.loading.override_values import format_override_value
from sluice.errors import ConfigError
from sluice.security.token_file import write_private

_TOKEN_BYTES = 32
_LONGEST_VALIDITY_DAYS = 3650
CERTIFICATES = "certs"
"""The folder of a run's certificates, in the run's folder."""
_DAYS = 365
_RENEWED_BEFORE = datetime.timedelta(days=30)
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
    typer.echo(_client_instructions(folder))


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
    files = _file_contents(_check_hosts(hosts), days)
    if not with_authority_key:
        del files["ca.key"]
    folder = out.absolute()
    write_private(folder, files, replace=replace)
    return folder


def _check_hosts(hosts: list[str]) -> list[str]:
    names = []
    for host in hosts:
        name, port = split_host_port(host)
        if port is not None or not name.isascii() or not name.isprintable() or " " in name:
            raise ConfigError(
                f"--host {host!r} is not a name or address; write it without a port, "
                "such as trainer.lab"
            )
        names.append(name)
    return names


def require_cryptography() -> None:
    """Raise ConfigError if the package that signs and reads certificates is missing."""
    try:
        import cryptography  # noqa: F401 - whether it is installed
    except ModuleNotFoundError as error:
        raise ConfigError(
            "certificates need the package cryptography; pip install 'sluice[certs]'"
        ) from error


def _file_contents(hosts: list[str], days: int) -> dict[str, bytes]:
    require_cryptography()
    from sluice.security.development_ca import LOCAL_NAMES, DevelopmentCa

    authority = DevelopmentCa(days)
    service = authority.service(tuple(dict.fromkeys((*LOCAL_NAMES, *hosts))), days)
    client = authority.client(days)
    for_service, for_client = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(2))
    # For the order of replacement see `write_certificates`.
    return {
        "client.pem": client.certificate,
        "ca.pem": authority.ca.certificate,
        "ca.key": authority.ca.key,
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


def _client_instructions(folder: Path) -> str:
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
        *(
            f"sluice.security.{key}={format_override_value(str(folder / name))}"
            for key, name in _SERVICE.items()
        ),
    ]


def ensure_certificates(
    folder: Path, report: Callable[[str], None], *, run_is_active: bool
) -> None:
    """Make certificates for all services in `folder`, unless usable ones are there.

    All services share one name, because replicas come and go. All files, with the authority and
    the tokens, are made again if one is missing, or a certificate expires within 30 days, is none,
    or was not issued by ca.pem. The services of an active run hold the files that they began with:
    then only faults count with which no service could start. Files of the user (without client.pem,
    or of another authority than ours) are never replaced; a notice names the problem.

    Args:
        folder: the folder of the files.
        report: called with each notice.
        run_is_active: whether a run uses the files.

    Raises:
        ConfigError: the folder cannot be read or written, and nothing was replaced; or the package
            that signs is missing.
    """
    require_cryptography()
    files = _read_files(folder)
    is_new = all(files[name] is None for name in _SERVICE.values())
    fault = _fault(folder, files, run_is_active=run_is_active)
    if fault is None:
        return
    # `write_certificates` writes client.pem first.
    if not is_new and (files["client.pem"] is None or _is_foreign(files)):
        report(
            f"notice: {fault}; files in {folder} that prepare did not make are not replaced: "
            "correct them, or delete the folder to have others made"
        )
        return
    write_certificates(folder, [], _DAYS, replace=True, with_authority_key=False)
    if is_new:
        report(f"{folder}: made certificates and tokens; clients need {_FOR_CLIENTS}")
    else:
        report(
            f"notice: {fault}; certificates and tokens in {folder} were made again: restart "
            f"running services, and give clients {_FOR_CLIENTS}"
        )


def _read_files(folder: Path) -> _Files:
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


def _fault(folder: Path, files: _Files, *, run_is_active: bool) -> str | None:
    """Return the first fault that counts; None: there is none."""
    needed_files, certificates = [*_SERVICE.values()], ["service.pem"]
    validity = datetime.timedelta()
    if not run_is_active:
        needed_files += _CLIENT
        certificates.append("client.pem")
        validity = _RENEWED_BEFORE
    if missing := [name for name in needed_files if files[name] is None]:
        return f"{folder} has no {', '.join(missing)}"
    from sluice.security.certificates import ends_of_validity
    from sluice.security.development_ca import was_issued_by

    now = datetime.datetime.now(datetime.UTC)
    for name in ("ca.pem", *certificates):
        try:
            end = ends_of_validity(files[name] or b"")[0]
        except ValueError as error:
            return f"{folder / name} is not a certificate ({error})"
        if end - now <= validity:
            verb = "was valid" if end <= now else "is valid"
            return f"{folder / name} {verb} until {end:%F %R} UTC"
    if _is_foreign(files):  # which may have others between itself and the service
        return None
    for name in certificates:
        if not was_issued_by(files[name] or b"", files["ca.pem"] or b""):
            return f"{folder / name} was not issued by ca.pem"
    return None


def _is_foreign(files: _Files) -> bool:
    from sluice.security.development_ca import is_of_a_development_ca

    for pem in (files["ca.pem"], files["service.pem"]):
        try:
            if pem is not None and not is_of_a_development_ca(pem):
                return True
        except ValueError:
            continue  # reported where dates are read
    return False
