"""Checks of `sluice.security.*` and of the files it names, before a process relies on them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET

from sluice.config.addresses import advertised_host, is_loopback
from sluice.config.problems import Problem, Severity
from sluice.config.run import RunConfig
from sluice.config.schema.service import FILE_FIELDS, SecurityConfig
from sluice.errors import ConfigError
from sluice.security.certificates import (
    DATES_PACKAGE,
    DATES_REMEDY,
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


def run_security_problems(config: RunConfig) -> list[Problem]:
    """Return the problems that prevent a run on one machine from being secured as configured."""
    services = config.sluice
    hosts: list[str] = []
    for endpoint in (s.endpoint for s in (services.reward, services.trainer, services.rollout)):
        try:
            hosts.append(advertised_host(endpoint))
        except ConfigError:
            continue  # the checks of endpoints report it
    problems = [p for host in hosts for p in server_problems(services.security, host)]
    # Three services share the files, so each problem comes up to three times.
    return list(
        {problem.text: problem for problem in (*problems, *_page_problems(config))}.values()
    )


def _page_problems(config: RunConfig) -> Iterator[Problem]:
    # The page shows prompts and responses. Its own process would refuse too, but in its log only.
    page, token_file = config.sluice.dashboard, config.sluice.security.token_file
    if page.port is not None and not token_file and not is_loopback(page.host):
        yield Problem(
            "sluice.dashboard.host",
            page.host,
            ": other machines could read prompts and responses",
            f"set {TOKEN_KEY} (`sluice certs` makes one), or listen on 127.0.0.1",
        )


def server_problems(security: SecurityConfig, host: str) -> list[Problem]:
    """Return the problems that prevent a service from being served with these settings at a
    host."""
    return _service_problems(security, host)


def client_problems(security: SecurityConfig) -> list[Problem]:
    """Return the problems that prevent a command from calling services with these settings."""
    return _service_problems(security, None)


def exposed_secrets(security: SecurityConfig) -> Iterator[Problem]:
    """Yield each secret that every user of this machine can read."""
    for name in ("key_file", "token_file"):
        path = getattr(security, name)
        if path and stat.S_IMODE(Path(path).stat().st_mode) & stat.S_IROTH:
            yield Problem(
                f"{SECURITY_KEY}.{name}",
                path,
                "can be read by every user of this machine",
                "chmod 600 it",
                severity=Severity.WARNING,
            )


def _service_problems(security: SecurityConfig, host: str | None) -> list[Problem]:
    """Return the problems of a service at a host; `None` for a caller that serves nothing."""
    for_server = host is not None
    missing = [*_empty_path_problems(security)] or [
        *_missing_file_problems(security, for_server=for_server)
    ]
    of_tokens = _token_problems(security, for_server=for_server)
    return missing or [*_certificate_problems(security, host), *of_tokens]


def _empty_path_problems(security: SecurityConfig) -> Iterator[Problem]:
    for name in _TEXT_FIELDS:
        if getattr(security, name) == "":
            nothing = "is empty, which switches nothing off"
            remedy = "give it a value, or leave it out"
            yield Problem(f"{SECURITY_KEY}.{name}", "", nothing, remedy)


def _missing_file_problems(security: SecurityConfig, *, for_server: bool) -> Iterator[Problem]:
    tls, key = security.tls, f"{SECURITY_KEY}.tls"
    for name in _needed_fields(security, for_server=for_server):
        if not getattr(security, name):
            needs = f"needs {SECURITY_KEY}.{name}, which is not set"
            remedy = "name a PEM file (`sluice certs` makes all of them), or set tls=off"
            yield Problem(key, tls, needs, remedy)
    for name in FILE_FIELDS:
        of_file, path = f"{SECURITY_KEY}.{name}", getattr(security, name)
        if path and not Path(path).is_file():
            yield Problem(of_file, path, "is no file", "check the path")
        elif path and not os.access(path, os.R_OK):
            yield Problem(of_file, path, "cannot be read by this user", "give the user that right")
    if for_server and tls != "off" and not can_read_dates():
        yield Problem(key, tls, f"needs {DATES_PACKAGE}", DATES_REMEDY)
    for name in ("ca_file", "cert_file", "key_file", "server_name"):
        if tls == "off" and (value := getattr(security, name)):
            message = f"has no effect with {key} = off"
            yield Problem(f"{SECURITY_KEY}.{name}", value, message, "set tls=mtls, or leave it out")


def _needed_fields(security: SecurityConfig, *, for_server: bool) -> tuple[str, ...]:
    if security.tls == "mtls":
        return ("ca_file", "cert_file", "key_file")
    return ("cert_file", "key_file") if security.tls == "server" and for_server else ()


def _certificate_problems(security: SecurityConfig, host: str | None) -> Iterator[Problem]:
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
        yield Problem(f"{SECURITY_KEY}.{error.field}", path, str(error))


def _token_problems(security: SecurityConfig, *, for_server: bool) -> Iterator[Problem]:
    if not security.token_file:
        return
    try:
        tokens = read_tokens(Path(security.token_file), TOKEN_KEY)
    except ConfigError as error:
        yield Problem("", UNSET, str(error))  # it names the key, the file and the remedy
        return
    if for_server and tokens[0].role is not Role.SERVICE:
        yield Problem(
            TOKEN_KEY,
            security.token_file,
            ": its first token is a client's, so services cannot call each other",
            "put a token of the role service first",
        )
