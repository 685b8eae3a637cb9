"""`sluice.security.*`: who may call the services. Holds names of files, never a secret."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.schema.section import Section

FILE_FIELDS = ("ca_file", "cert_file", "key_file", "token_file")
# An empty text is a variable that was left unset; it must not switch protection off.
_Given = Annotated[str, Meta(min_length=1)]


class SecurityConfig(Section, frozen=True):
    """TLS and bearer tokens of all servers and calls."""

    tls: Literal["off", "server", "mtls"] = "off"
    """off: no encryption; server: callers check the server's certificate; mtls: the server checks
    the caller's certificate too.
    """

    ca_file: _Given | None = None
    """PEM file of the peers' certificate authorities; none, if tls is server: the system's."""

    cert_file: _Given | None = None
    """PEM file of this process's certificate chain."""

    key_file: _Given | None = None
    """PEM file of the private key of cert_file, unencrypted."""

    server_name: _Given | None = None
    """Name that callers expect in every server's certificate, instead of its address; none: the
    address to which they connect.
    """

    token_file: _Given | None = None
    """File of bearer tokens, one per line: servers accept all, callers present the first; none: the
    token in SLUICE_TOKEN, and without that no token is required.
    """
