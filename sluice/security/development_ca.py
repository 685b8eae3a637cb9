"""A certificate authority for development, and the certificates that it signs, as PEM.

The profile follows RFC 5280: version 3, key identifiers, a critical basic constraint, and the
purposes of section 4.2.1.12, so that a client's certificate cannot pass for a server's.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER_NAME = "sluice"
LOCAL_NAMES = (SERVER_NAME, "localhost", "127.0.0.1", "::1")
# The clocks of other machines may be behind ours.
_CLOCK_SKEW = datetime.timedelta(minutes=5)
_AUTHORITY_NAME = "sluice development CA"
_SHORTEST = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertifiedKey:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


class DevelopmentCa:
    """A certificate authority. Every length of validity may be below 0: then it has passed.

    Args:
        days: how long the authority's own certificate is valid.
    """

    def __init__(self, days: int) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(_AUTHORITY_NAME)
        usage = _key_usage(signs_certificates=True)
        self._certificate = (
            self._builder(self._name, self._key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def ca(self) -> CertifiedKey:
        """Return the authority's own certificate and key."""
        return _as_pem(self._certificate, self._key)

    def service(self, hosts: Sequence[str], days: int) -> CertifiedKey:
        """Return a certificate for servers at `hosts`, which also call each other.

        Args:
            hosts: names and addresses that peers connect to.
            days: how long it is valid.
        """
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._sign("sluice service", purposes, hosts, days)

    def client(self, days: int) -> CertifiedKey:
        """Return a certificate for callers that serve nothing, valid for `days`."""
        return self._sign("sluice client", [ExtendedKeyUsageOID.CLIENT_AUTH], (), days)

    def _sign(
        self,
        name: str,
        purposes: Sequence[x509.ObjectIdentifier],
        hosts: Sequence[str],
        days: int,
    ) -> CertifiedKey:
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            self._builder(_name(name), key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(authority, critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return _as_pem(builder.sign(self._key, hashes.SHA256()), key)

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        ends = now + datetime.timedelta(days=days)
        begins = min(now, ends - _SHORTEST) - _CLOCK_SKEW
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )


def was_issued_by(certificate: bytes, authority: bytes) -> bool:
    """Return whether `authority` itself signed `certificate`, with no authority between them.

    Args:
        certificate, authority: PEM; of several the first counts.

    Raises:
        ValueError: one of them is no certificate.
    """
    issued = x509.load_pem_x509_certificate(certificate)
    issuer = x509.load_pem_x509_certificate(authority)
    try:
        issued.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def is_of_a_development_ca(certificate: bytes) -> bool:
    """Return whether the issuer of a certificate (PEM) has the name of a `DevelopmentCa`.

    Raises:
        ValueError: it is no certificate.
    """
    return x509.load_pem_x509_certificate(certificate).issuer == _name(_AUTHORITY_NAME)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _as_pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> CertifiedKey:
    return CertifiedKey(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
