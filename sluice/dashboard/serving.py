"""The live page of one run, from its folder to the socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from sluice.client.run_address import RunLocation
from sluice.config.host_port import join_host_port
from sluice.config.security import SecurityConfig
from sluice.dashboard.live_status import Explain, LiveStatus, check_location
from sluice.dashboard.run_record_reader import RunRecordReader
from sluice.dashboard.sample_files import folders_of_run
from sluice.errors import ConfigError
from sluice.rpc.bound_socket import check_bindable
from sluice.rpc.credentials import Credentials
from sluice.rpc.exposure import is_loopback

__all__ = ["URL_NAME", "serve_page"]

URL_NAME = "dashboard.url"
_NO_EXTRA = "dashboard: aiohttp is not installed; pip install 'sluice[dashboard]'"


async def serve_page(
    run_dir: Path,
    host: str,
    port: int,
    *,
    explain: Explain,
    stop: asyncio.Event,
    on_address: Callable[[str], None],
) -> None:
    """Serves until `stop` is set; the address stands in `dashboard.url` of the folder meanwhile.

    Args:
        explain: finds who is behind the waits of services.
        on_address: told of the address of the page.

    Raises:
        ConfigError: nothing was started in the folder, the address cannot be listened on, it is
            open to other machines and no token is asked for, or aiohttp is not installed.
    """
    try:
        from sluice.dashboard.web_app import DashboardPage, PageSettings, listening
    except ImportError as error:
        raise ConfigError(_NO_EXTRA) from error
    location = check_location(run_dir)
    credentials, is_local = location.credentials, is_loopback(host)
    tls = None if is_local else _tls_context(location.config.sluice.security)
    _check_exposure(host, credentials, is_local=is_local)
    check_bindable(host, port)
    record, live = _record(location), LiveStatus(run_dir, explain)
    page = DashboardPage(record, live, PageSettings(credentials.tokens, only_loopback=is_local))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(live.close)
        bound = await stack.enter_async_context(listening(page, host, port, tls))
        url = f"{'https' if tls else 'http'}://{join_host_port(host, bound)}/"
        stack.callback(_note_address(run_dir / URL_NAME, url))
        on_address(url)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(record.follow(), name="run folder")
            await stop.wait()
            following.cancel()


def _record(location: RunLocation) -> RunRecordReader:
    trainer = location.config.trainer
    folders = folders_of_run(
        location.run_dir, trainer.rollout_data_dir, trainer.validation_data_dir
    )
    return RunRecordReader(location.run_dir, folders, trainer.total_training_steps)


def _check_exposure(host: str, credentials: Credentials, *, is_local: bool) -> None:
    if not is_local and credentials.tokens is None:
        raise ConfigError(
            f"host {host}: other machines could read prompts and responses; set "
            "sluice.security.token_file (`sluice certs` makes one), or listen on 127.0.0.1"
        )


def _tls_context(security: SecurityConfig) -> ssl.SSLContext | None:
    """Of the services' own certificate; browsers are asked for a token, not for a certificate."""
    if security.tls == "off" or not security.cert_file or not security.key_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(security.cert_file, security.key_file)
    return context


def _note_address(file: Path, url: str) -> Callable[[], None]:
    """Writes the address for others to find; gives what puts back the state before."""
    try:
        before = file.read_text(encoding="utf-8") if file.is_file() else None
        file.write_text(f"{url}\n", encoding="utf-8")
    except OSError:  # a folder that is only read, as of a run of somebody else
        return lambda: None
    return lambda: _restore(file, url, before)


def _restore(file: Path, url: str, before: str | None) -> None:
    """Leaves an address alone that another page has written since."""
    try:
        if file.read_text(encoding="utf-8").strip() != url:
            return
        if before is None:
            file.unlink()
        else:
            file.write_text(before, encoding="utf-8")
    except OSError:
        return
