"""What is wrong with credentials is reported with the key, its value and the remedy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import dump_config, flat_settings
from sluice.config.rules.security import (
    client_problems,
    exposed_secrets,
    run_security_problems,
    server_problems,
)
from sluice.config.run import RunConfig
from sluice.config.schema.service import FILE_FIELDS, SecurityConfig, ServiceConfig
from tests.support.certified import (
    CLIENT_TOKEN,
    SERVICE_TOKEN,
    authority,
    client_key,
    service_key,
    write_pair,
    write_security,
)

HOST = "127.0.0.1"


def problems(folder: Path, host: str = HOST, **changes: Any) -> list[str]:
    given = {**write_security(folder), **changes}
    return [one.text for one in server_problems(SecurityConfig(**given), host)]


def problems_of(*overrides: str) -> list[str]:
    return [one.text for one in run_security_problems(load_config(None, list(overrides)))]


def test_the_defaults_ask_for_nothing() -> None:
    assert server_problems(SecurityConfig(), HOST) == []
    assert client_problems(SecurityConfig()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "sluice"])
def test_certificates_that_fit_are_accepted_at_every_name_in_them(
    host: str, tmp_path: Path
) -> None:
    assert problems(tmp_path, host) == []


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_mtls_needs_each_of_its_files(name: str, tmp_path: Path) -> None:
    (reported,) = problems(tmp_path, **{name: None})
    assert reported.startswith(
        f"sluice.security.tls = mtls needs sluice.security.{name}, which is not"
    )


@pytest.mark.parametrize("name", FILE_FIELDS)
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    assert problems(tmp_path, **{name: missing}) == [
        f"sluice.security.{name} = {missing} is no file; check the path"
    ]


def test_a_file_that_this_user_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith(".key"))
    (reported,) = problems(tmp_path)
    assert reported.endswith("service.key cannot be read by this user; give the user that right")


def test_a_name_that_the_certificate_lacks_is_reported_with_both_remedies(tmp_path: Path) -> None:
    (reported,) = problems(tmp_path, "trainer.lab")
    assert reported.startswith("sluice.security.cert_file = ")
    assert "does not name trainer.lab, where peers connect to" in reported
    assert "`sluice certs --host trainer.lab`" in reported
    assert "sluice.security.server_name" in reported
    assert problems(tmp_path, "trainer.lab", server_name="sluice") == []
    (reported,) = problems(tmp_path, "10.1.2.3")
    assert "does not name 10.1.2.3" in reported


def test_an_expired_certificate_is_reported(tmp_path: Path) -> None:
    expired = authority("ours").service((HOST,), -1)
    certificate, key = write_pair(tmp_path, "expired", expired)
    (reported,) = problems(tmp_path, cert_file=certificate, key_file=key)
    assert reported.startswith(
        f"sluice.security.cert_file = {certificate} has expired; make another"
    )


def test_a_key_of_another_certificate_is_reported(tmp_path: Path) -> None:
    _, key = write_pair(tmp_path, "other", client_key())
    (reported,) = problems(tmp_path, key_file=key)
    assert reported.startswith(
        f"sluice.security.key_file = {key} does not belong to the certificate"
    )


def test_an_authority_that_did_not_sign_is_reported(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(authority("theirs").ca.certificate)
    (reported,) = problems(tmp_path, ca_file=str(tmp_path / "theirs"))
    assert "theirs did not sign the certificate; give the CA that did" in reported


@pytest.mark.parametrize(
    ("name", "about"), [("cert_file", "key_file"), ("key_file", "key_file"), ("ca_file", "ca_file")]
)
def test_a_file_that_is_no_pem_is_reported(name: str, about: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no PEM")
    (reported,) = problems(tmp_path, **{name: str(tmp_path / "text")})
    assert reported.startswith(f"sluice.security.{about} = ")
    assert "no PEM file" in reported


def test_a_clients_certificate_cannot_serve(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path, "client", client_key())
    (reported,) = problems(tmp_path, cert_file=certificate, key_file=key)
    assert "is refused by peers: " in reported
    assert client_problems(SecurityConfig(**write_security(tmp_path))) == []


def test_files_without_tls_are_refused_for_they_would_protect_nothing(tmp_path: Path) -> None:
    found = problems(tmp_path, tls="off")
    assert [reported.partition(" = ")[0] for reported in found] == [
        "sluice.security.ca_file",
        "sluice.security.cert_file",
        "sluice.security.key_file",
    ]
    assert all("has no effect with sluice.security.tls = off; set tls=mtls" in t for t in found)


def test_services_present_a_services_token(tmp_path: Path) -> None:
    tokens = tmp_path / "clients"
    tokens.write_text(f"client {CLIENT_TOKEN}\n{SERVICE_TOKEN}")
    (reported,) = problems(tmp_path, token_file=str(tokens))
    assert "its first token is a client's, so services cannot call each other" in reported
    given = {**write_security(tmp_path), "token_file": str(tokens)}
    assert client_problems(SecurityConfig(**given)) == []


@pytest.mark.parametrize("name", ["key_file", "token_file"])
def test_a_secret_that_everybody_can_read_gets_a_warning(name: str, tmp_path: Path) -> None:
    given = write_security(tmp_path)
    assert list(exposed_secrets(SecurityConfig(**given))) == []
    Path(given[name]).chmod(0o644)
    (reported,) = exposed_secrets(SecurityConfig(**given))
    assert reported.text.startswith(
        f"sluice.security.{name} = {given[name]} can be read by every user"
    )


def test_a_run_is_checked_at_the_addresses_of_all_its_services(tmp_path: Path) -> None:
    given = write_security(tmp_path)
    overrides = [f"sluice.security.{key}={value}" for key, value in given.items()]
    assert [p for p in problems_of(*overrides) if "security" in p] == []
    far = "sluice.rollout.endpoint.advertise=node-7"
    (reported,) = [p for p in problems_of(*overrides, far) if "security" in p]
    assert "does not name node-7" in reported


def test_a_page_for_other_machines_needs_a_token_file(tmp_path: Path) -> None:
    far = ["sluice.dashboard.port=0", "sluice.dashboard.host=0.0.0.0"]
    (reported,) = [p for p in problems_of(*far) if "dashboard.host" in p]
    assert "0.0.0.0" in reported
    assert "token_file" in reported
    asked = [f"sluice.security.token_file={write_security(tmp_path)['token_file']}"]
    for accepted in ([*far, *asked], far[:1], far[1:]):
        found = problems_of(*accepted)
        assert [p for p in found if "dashboard.host" in p] == []


def test_a_dump_names_files_and_holds_no_secret(tmp_path: Path) -> None:
    security = SecurityConfig(**write_security(tmp_path))
    config = RunConfig(sluice=ServiceConfig(security=security))
    shown = dump_config(config) + str(flat_settings(config))
    assert "tokens" in shown
    assert SERVICE_TOKEN not in shown
    assert service_key().key.decode()[:60] not in shown
