"""Where a process's credentials come from."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec
import pytest

from sluice.config.addresses import is_loopback
from sluice.config.loading.loader import load_config
from sluice.config.schema.service import FILE_FIELDS, EndpointConfig, SecurityConfig
from sluice.errors import ConfigError
from sluice.rpc.credentials import (
    FILE_VARIABLES,
    OPEN,
    Credentials,
    client_credentials,
    exposure_warning,
    service_credentials,
)
from sluice.rpc.server import RpcServer
from sluice.security.development_ca import LOCAL_NAMES
from sluice.security.token_file import Role
from tests.support.certified import (
    ACCEPTED,
    CLIENT_TOKEN,
    SERVICE_TOKEN,
    FixedTokens,
    authority,
    client_key,
    mutual,
    service_key,
    write_pair,
    write_security,
)
from tests.support.rpc_server import LIMIT_BYTES

GIVEN = "a-token-from-outside-01"


def first_secret(credentials: Credentials) -> str | None:
    return credentials.tokens.tokens()[0].secret if credentials.tokens else None


def test_without_settings_and_variables_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_TOKEN", raising=False)
    assert service_credentials(SecurityConfig(), EndpointConfig()) == Credentials()
    assert client_credentials(SecurityConfig(), {}) == Credentials()


def test_a_service_takes_the_files_of_its_configuration(tmp_path: Path) -> None:
    given = write_security(tmp_path)
    found = service_credentials(SecurityConfig(**given), EndpointConfig())
    assert found.certificate == Path(given["cert_file"]).read_bytes()
    assert found.is_encrypted
    assert found.asks_certificate
    assert first_secret(found) == SERVICE_TOKEN


def test_a_service_that_peers_would_refuse_does_not_start(tmp_path: Path) -> None:
    endpoint = EndpointConfig(host="0.0.0.0", advertise="trainer.lab:7001")
    with pytest.raises(ConfigError, match=r"does not name trainer\.lab, where peers connect to"):
        service_credentials(SecurityConfig(**write_security(tmp_path)), endpoint)


def test_the_variable_is_the_token_of_services_that_have_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_TOKEN", GIVEN)
    found = service_credentials(SecurityConfig(), EndpointConfig())
    assert found.tokens is not None
    assert [(t.secret, t.role) for t in found.tokens.tokens()] == [(GIVEN, Role.SERVICE)]
    secured = SecurityConfig(**write_security(tmp_path))
    assert first_secret(service_credentials(secured, EndpointConfig())) == SERVICE_TOKEN


def test_a_commands_variables_come_before_the_runs_configuration(tmp_path: Path) -> None:
    configured = SecurityConfig(**write_security(tmp_path))
    certificate, key = write_pair(tmp_path, "client", client_key())
    (tmp_path / "client.token").write_text(f"client {CLIENT_TOKEN}")
    files = {
        "SLUICE_CERT_FILE": certificate,
        "SLUICE_KEY_FILE": key,
        "SLUICE_TOKEN_FILE": str(tmp_path / "client.token"),
    }
    found = client_credentials(configured, files)
    assert found.certificate == client_key().certificate
    assert first_secret(found) == CLIENT_TOKEN
    assert first_secret(client_credentials(configured, {**files, "SLUICE_TOKEN": GIVEN})) == GIVEN


def test_a_command_needs_no_right_to_read_what_its_variables_replace(tmp_path: Path) -> None:
    given = write_security(tmp_path)
    certificate, key = write_pair(tmp_path, "client", client_key())
    away = SecurityConfig(**{**given, "cert_file": "/gone", "key_file": "/gone", "token_file": "/"})
    files = {"SLUICE_CERT_FILE": certificate, "SLUICE_KEY_FILE": key, "SLUICE_TOKEN": GIVEN}
    assert client_credentials(away, files).certificate == client_key().certificate
    with pytest.raises(ConfigError, match=r"sluice\.security\.cert_file = /gone is no file"):
        client_credentials(away, {})


@pytest.mark.parametrize("name", [*FILE_FIELDS, "server_name"])
def test_an_empty_setting_is_refused_and_switches_nothing_off(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"sluice\.security\.{name}"):
        load_config(None, [f"sluice.security.{name}=''"])
    for load in (
        lambda security: service_credentials(security, EndpointConfig()),
        lambda security: client_credentials(security, {}),
    ):
        with pytest.raises(ConfigError, match=rf"sluice\.security\.{name} = '' is empty"):
            load(SecurityConfig(**{name: ""}))


def test_an_empty_token_is_no_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_TOKEN", "")
    with pytest.raises(ConfigError, match="SLUICE_TOKEN: a token of 0 characters"):
        service_credentials(SecurityConfig(), EndpointConfig())
    with pytest.raises(ConfigError, match="SLUICE_TOKEN: a token of 0 characters"):
        client_credentials(SecurityConfig(), {"SLUICE_TOKEN": ""})


@pytest.mark.parametrize("name", FILE_VARIABLES.values())
def test_an_empty_variable_of_a_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set and empty; name a file, or unset it"):
        client_credentials(SecurityConfig(), {name: ""})


def test_where_servers_ask_for_none_a_caller_needs_no_key_of_theirs(tmp_path: Path) -> None:
    given = {**write_security(tmp_path), "tls": "server", "cert_file": "/gone", "key_file": "/gone"}
    found = client_credentials(SecurityConfig(**given), {})
    assert (found.certificate, found.key, found.is_encrypted) == (None, None, True)
    certificate, key = write_pair(tmp_path, "client", client_key())
    named = {"SLUICE_CERT_FILE": certificate, "SLUICE_KEY_FILE": key}
    assert client_credentials(SecurityConfig(**given), named).key == client_key().key


def test_variables_of_files_do_nothing_for_a_run_without_tls() -> None:
    assert client_credentials(SecurityConfig(), {"SLUICE_CA_FILE": "/gone"}) == Credentials()


def test_a_secret_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = write_security(tmp_path)
    Path(given["token_file"]).chmod(0o644)
    service_credentials(SecurityConfig(**given), EndpointConfig())
    (reported,) = caplog.messages
    assert reported.endswith("can be read by every user of this machine; chmod 600 it")
    assert SERVICE_TOKEN not in reported


def test_a_service_warns_of_a_certificate_that_ends_soon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = write_security(tmp_path)
    write_pair(tmp_path, "service", authority("ours").service(LOCAL_NAMES, 5))
    service_credentials(SecurityConfig(**given), EndpointConfig())
    (reported,) = caplog.messages
    assert reported.startswith("sluice.security.cert_file ends on ")
    assert "in 4 days" in reported


def test_settings_hold_for_programs_that_use_the_sdk(tmp_path: Path) -> None:
    given = write_security(tmp_path)
    caller = msgspec.structs.replace(SecurityConfig(tls="server"), ca_file=given["ca_file"])
    found = client_credentials(caller, {"SLUICE_TOKEN": GIVEN})
    assert found.is_encrypted
    assert found.certificate is None


def test_a_token_is_in_no_repr_of_what_holds_it() -> None:
    shown = repr(Credentials(key=b"the-key", tokens=FixedTokens(ACCEPTED.of)))
    assert SERVICE_TOKEN not in shown
    assert "the-key" not in shown


EVERYWHERE = "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "[::1]"])
def test_loopback_is_known_by_address_and_by_name(host: str) -> None:
    assert is_loopback(host)
    assert exposure_warning(host, OPEN) is None


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "[::]", "192.0.2.7", "no-such-host.invalid"])
def test_everything_else_may_be_reached_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("credentials", "reported"),
    [
        (OPEN, "can then steer the run .* set sluice.security.tls=mtls or sluice.security"),
        (Credentials(is_encrypted=True), "can then steer the run"),
        (Credentials(tokens=ACCEPTED), "tokens and data travel unencrypted; set sluice.security"),
        (Credentials(is_encrypted=True, asks_certificate=True), None),
        (Credentials(is_encrypted=True, tokens=ACCEPTED), None),
    ],
    ids=["open", "tls only", "token only", "mtls", "tls and token"],
)
def test_a_warning_names_what_is_missing_and_the_remedy(
    credentials: Credentials, reported: str | None
) -> None:
    found = exposure_warning(EVERYWHERE, credentials)
    if reported is None:
        assert found is None
    else:
        assert re.search(reported, found or "")


@pytest.mark.parametrize(("secured", "num_warnings"), [(False, 1), (True, 0)])
async def test_a_server_open_to_other_machines_warns_once_at_its_start(
    secured: bool, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = mutual(service_key()) if secured else OPEN
    server = RpcServer(
        [], [], host=EVERYWHERE, port=0, max_message_bytes=LIMIT_BYTES, credentials=credentials
    )
    await server.start()
    await server.stop(0)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == num_warnings
