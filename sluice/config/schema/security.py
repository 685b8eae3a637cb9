"""`sluice.security.*`: who may call the services. Holds names of files, never a secret."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.schema.section import Section

FILE_FIELDS = ("ca_file", "cert_file", "key_file", "token_file")
# An empty text is a variable that was left unset; it must not switch protection off.
_Given = Annotated[str, Meta(min_length=1)]


class SecurityConfig(Section, frozen=True):
    """TLS and bearer tokens of every server and every call."""

    tls: Literal["off", "server", "mtls"] = "off"
    """server: callers check the server's certificate; mtls: the server checks the caller's as well;
    off: nothing is encrypted.
    """

    ca_file: _Given | None = None
    """PEM file of the authorities that signed the peers' certificates; none, for server only: the
    system's.
    """

    cert_file: _Given | None = None
    """PEM file of this process's certificate and its chain."""

    key_file: _Given | None = None
    """PEM file of the certificate's private key, unencrypted."""

    server_name: _Given | None = None
    """Name that every server's certificate carries, whatever its address; none: the address to
    which peers connect.
    """

    token_file: _Given | None = None
    """File of bearer tokens, one a line: all are accepted, the first is presented; none: that of
    SLUICE_TOKEN, or no token is required.
    """
