"""Serve the dashboard of a run, or export it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from sluice.concurrency.process import noted_file
from sluice.config.addresses import is_loopback, join_host_port
from sluice.config.rules.security import TOKEN_KEY
from sluice.config.schema.security import SecurityConfig
from sluice.dashboard.export import export_page
from sluice.dashboard.live_status import LiveStatus, check_location
from sluice.dashboard.run_data import RunData
from sluice.errors import ConfigError
from sluice.report.run_record import METRICS_NAME
from sluice.rpc.ports import check_bindable
from sluice.security.token_file import TokenFile, TokenSource

URL_NAME = "dashboard.url"
_MOST_CONNECTIONS, _SHUTDOWN_S = 64, 2.0
_NO_EXTRA = "dashboard: aiohttp is not installed; pip install 'sluice[dashboard]'"


async def serve_page(
    run_dir: Path,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    on_address: Callable[[str], None],
    others: Sequence[Path] = (),
) -> None:
    """Serve until `stop` is set; meanwhile `dashboard.url` in the folder holds the address.

    Args:
        run_dir: the run's folder.
        host: the interface to listen on.
        port: the port; 0 lets the system choose one.
        stop: ends the server.
        on_address: called with the address of the page.
        others: folders of runs to show beside it.

    Raises:
        ConfigError: no run was started in the folder, the address is not free, it is open to
            other machines and no token is required, tokens or certificate cannot be used, or
            aiohttp is not installed.
    """
    try:
        from sluice.dashboard.web_app import DashboardPage
        from sluice.web import serve_http
    except ImportError as error:
        raise ConfigError(_NO_EXTRA) from error
    location = check_location(run_dir)
    _ = location.credentials  # reports errors in them before the page is served
    security, is_local = location.config.sluice.security, is_loopback(host)
    tokens = _tokens(security, host, is_local=is_local)
    tls = None if is_local else _tls_context(security)
    check_bindable(host, port)
    live = LiveStatus(run_dir)
    data = RunData(location.run_dir, location.config.trainer, others=_known(others))
    page = DashboardPage(data, live, tokens, only_loopback=is_local)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(live.close)
        stack.callback(page.close)
        server = serve_http(
            page.app(),
            host,
            port,
            most_connections=_MOST_CONNECTIONS,
            shutdown_s=_SHUTDOWN_S,
            tls=tls,
        )
        bound = await stack.enter_async_context(server)
        url = f"{'https' if tls else 'http'}://{join_host_port(host, bound)}/"
        stack.enter_context(noted_file(run_dir / URL_NAME, f"{url}\n"))
        on_address(url)
        await stop.wait()


def write_report(run_dir: Path, file: Path, others: Sequence[Path] = ()) -> None:
    """Write the page of a run as one file, with its data inside, beside `others`.

    Raises:
        ConfigError: no run was started in the folder.
        OSError: a file cannot be read or written.
    """
    location = check_location(run_dir)
    export_page(location.run_dir, location.config.trainer, file, _known(others))


def _known(others: Sequence[Path]) -> Sequence[Path]:
    """Return the folders. Raises ConfigError for one without metrics."""
    for folder in others:
        if not (folder / METRICS_NAME).is_file():
            raise ConfigError(
                f"compare: {folder} holds no {METRICS_NAME}; give the folder of a run that trained"
            )
    return others


def _tokens(security: SecurityConfig, host: str, *, is_local: bool) -> TokenSource | None:
    """Return the tokens that the page requires, from the configuration.

    SLUICE_TOKEN is not one of them: the page sends it to the run's services to identify itself.

    Raises:
        ConfigError: they cannot be read, or there are none and `host` is open to other machines.
    """
    if security.token_file is not None:
        return TokenFile(Path(security.token_file), TOKEN_KEY)
    if not is_local:
        raise ConfigError(
            f"host {host}: other machines could read prompts and responses; set {TOKEN_KEY} "
            "(`sluice certs` makes one), or listen on 127.0.0.1"
        )
    return None


def _tls_context(security: SecurityConfig) -> ssl.SSLContext | None:
    """Return a context with the services' certificate. Browsers show a token, not a certificate.

    Raises:
        ConfigError: the certificate cannot be used.
    """
    if security.tls == "off" or not security.cert_file or not security.key_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(security.cert_file, security.key_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"sluice.security.cert_file = {security.cert_file!r}, key_file = "
            f"{security.key_file!r}: {error}; give a certificate and its key, both PEM"
        ) from error
    return context
