"""Where a process's credentials come from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sluice.config.loading.loader import load_config
from sluice.config.schema.security import FILE_FIELDS, SecurityConfig
from sluice.config.schema.service import EndpointConfig
from sluice.errors import ConfigError
from sluice.rpc.credentials import (
    FILE_VARIABLES,
    Credentials,
    client_credentials,
    service_credentials,
)
from sluice.security.development_ca import LOCAL_NAMES
from sluice.security.token_file import Role
from tests.support.certified import (
    ACCEPTED,
    CLIENT_TOKEN,
    SERVICE_TOKEN,
    FixedTokens,
    authority,
    client_key,
    write_pair,
    write_security,
)

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
