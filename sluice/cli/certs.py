"""`sluice certs`: a development CA with the files that a secured run needs."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import Annotated

import typer

from sluice.config.host_port import split_host_port
from sluice.errors import ConfigError
from sluice.security.private_files import write_private

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
