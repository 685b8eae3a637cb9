"""Dates of certificates, and the package that reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sluice.config.schema.service import EndpointConfig, SecurityConfig
from sluice.errors import ConfigError
from sluice.rpc.credentials import client_credentials, service_credentials
from sluice.security import certificates
from sluice.security.certificates import ends_of_validity
from tests.support.certified import authority, service_key, write_security


def test_every_certificate_of_a_chain_has_its_end() -> None:
    parts = service_key().certificate, authority("ours").ca.certificate
    (own,), (issuer,) = (ends_of_validity(part) for part in parts)
    assert list(ends_of_validity(b"".join(parts))) == [own, issuer]


@pytest.mark.parametrize("broken", [b"", b"no certificate", service_key().certificate[:300]])
def test_what_is_no_certificate_is_an_error(broken: bytes) -> None:
    with pytest.raises(ValueError):
        ends_of_validity(broken)


def test_a_service_with_tls_needs_the_package_that_reads_dates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = SecurityConfig(**write_security(tmp_path))
    monkeypatch.setattr(certificates, "find_spec", lambda _name: None)
    expected = r"sluice\.security\.tls = mtls needs the package cryptography.*sluice\[certs\]"
    with pytest.raises(ConfigError, match=expected):
        service_credentials(security, EndpointConfig())
    assert client_credentials(security, {}).is_encrypted
    service_credentials(SecurityConfig(), EndpointConfig())


def test_without_the_package_reading_dates_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"pip install 'sluice\[certs\]'"):
        ends_of_validity(service_key().certificate)
