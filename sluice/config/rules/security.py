"""Checks of `sluice.security.*` and of the files it names, before a process relies on them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from sluice.config.addresses import advertised_host, is_loopback
from sluice.config.run import RunConfig
from sluice.config.schema.security import FILE_FIELDS, SecurityConfig
from sluice.errors import ConfigError
from sluice.security.certificates import (
    MISSING_PACKAGE,
    CertificateError,
    TlsFiles,
    can_read_dates,
    check_pair,
    check_served_name,
)
from sluice.security.token_file import Role, read_tokens

SECURITY_KEY = "sluice.security"
TOKEN_KEY = f"{SECURITY_KEY}.token_file"
_TEXT_FIELDS = (*FILE_FIELDS, "server_name")


def run_security_problems(config: RunConfig) -> list[str]:
    """What keeps a whole run on one machine from being secured as configured."""
    services = config.sluice
    hosts: list[str] = []
    for endpoint in (s.endpoint for s in (services.reward, services.trainer, services.rollout)):
        try:
            hosts.append(advertised_host(endpoint))
        except ConfigError:
            continue  # told by the checks of endpoints
    problems = [p for host in hosts for p in server_problems(services.security, host)]
    return list(dict.fromkeys([*problems, *_page_problems(config)]))


def _page_problems(config: RunConfig) -> Iterator[str]:
    """The page shows prompts and responses; its process would end, and tell so in its log only."""
    page, token_file = config.sluice.dashboard, config.sluice.security.token_file
    if page.port is not None and not token_file and not is_loopback(page.host):
        yield (
            f"sluice.dashboard.host = {page.host}: other machines could read prompts and "
            f"responses; set {TOKEN_KEY} (`sluice certs` makes one), or listen on 127.0.0.1"
        )


def server_problems(security: SecurityConfig, host: str) -> list[str]:
    """What keeps a service from being served at `host` with these settings.

    Args:
        host: the name or address that peers connect to.
    """
    problems = _missing(security, for_server=True)
    if problems:
        return problems
    return [*_certificate_problems(security, host), *_token_problems(security, for_server=True)]


def client_problems(security: SecurityConfig) -> list[str]:
    """What keeps a command from calling services with these settings."""
    problems = _missing(security, for_server=False)
    if problems:
        return problems
    return [*_certificate_problems(security, None), *_token_problems(security, for_server=False)]


def exposed_secrets(security: SecurityConfig) -> Iterator[str]:
    """A sentence for each secret that every user of this machine can read."""
    for name in ("key_file", "token_file"):
        path = getattr(security, name)
        if path and stat.S_IMODE(Path(path).stat().st_mode) & stat.S_IROTH:
            yield (
                f"{SECURITY_KEY}.{name} = {path!r} can be read by every user of this machine; "
                "chmod 600 it"
            )


def _missing(security: SecurityConfig, *, for_server: bool) -> list[str]:
    empty = [
        f"{SECURITY_KEY}.{name} = '' is empty, which switches nothing off; give it a value, or "
        "take it out"
        for name in _TEXT_FIELDS
        if getattr(security, name) == ""
    ]
    if empty:
        return empty
    needed = _needed(security, for_server=for_server)
    problems = [
        f"{SECURITY_KEY}.tls = {security.tls} needs {SECURITY_KEY}.{name}, which is not set; "
        "name a PEM file "
        "(`sluice certs` makes all of them), or set tls=off"
        for name in needed
        if not getattr(security, name)
    ]
    for name in FILE_FIELDS:
        path = getattr(security, name)
        if path and not Path(path).is_file():
            problems.append(f"{SECURITY_KEY}.{name} = {path!r} is no file; check the path")
        elif path and not os.access(path, os.R_OK):
            problems.append(
                f"{SECURITY_KEY}.{name} = {path!r} cannot be read by this user; give it the right"
            )
    if for_server and security.tls != "off" and not can_read_dates():
        problems.append(f"{SECURITY_KEY}.tls = {security.tls} needs {MISSING_PACKAGE}")
    if security.tls == "off":
        problems += [
            f"{SECURITY_KEY}.{name} = {getattr(security, name)!r} has no effect with "
            f"{SECURITY_KEY}.tls = off; set "
            "tls=mtls, or take it out"
            for name in ("ca_file", "cert_file", "key_file", "server_name")
            if getattr(security, name)
        ]
    return problems


def _needed(security: SecurityConfig, *, for_server: bool) -> tuple[str, ...]:
    if security.tls == "mtls":
        return ("ca_file", "cert_file", "key_file")
    return ("cert_file", "key_file") if security.tls == "server" and for_server else ()


def _certificate_problems(security: SecurityConfig, host: str | None) -> Iterator[str]:
    certificate, key = security.cert_file, security.key_file
    if security.tls == "off" or not certificate or not key:
        return
    files = TlsFiles(certificate, key, security.ca_file)
    try:
        if host is None:
            check_pair(files)
        else:
            name = security.server_name or host
            check_served_name(files, name, mutual=security.tls == "mtls")
    except CertificateError as error:
        path = getattr(security, error.field)
        yield f"{SECURITY_KEY}.{error.field} = {path!r} {error}"


def _token_problems(security: SecurityConfig, *, for_server: bool) -> Iterator[str]:
    if not security.token_file:
        return
    try:
        tokens = read_tokens(Path(security.token_file), TOKEN_KEY)
    except ConfigError as error:
        yield str(error)
        return
    if for_server and tokens[0].role is not Role.SERVICE:
        yield (
            f"{TOKEN_KEY} = {security.token_file!r}: its first token is a client's, with which "
            "services cannot call each other; put a token of the role service first"
        )
