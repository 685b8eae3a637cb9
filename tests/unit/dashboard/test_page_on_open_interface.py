"""The page on an interface that other machines reach: HTTPS, and a token for everything."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sluice.dashboard import serving
from sluice.dashboard.live_status import check_location
from sluice.dashboard.serving import serve_page
from sluice.errors import ConfigError
from tests.support.certified import CLIENT_TOKEN, write_security
from tests.support.dashboard_run import fill_run, make_run

LONG_S = 60.0


def get(url: str, ca_file: str, token: str = "") -> bytes:
    headers = {"Authorization": f"Bearer {token}", "Host": "training.example"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    context = ssl.create_default_context(cafile=ca_file)
    with urllib.request.urlopen(request, timeout=LONG_S, context=context) as answer:
        return bytes(answer.read())


async def test_it_is_encrypted_and_asks_for_a_token(tmp_path: Path) -> None:
    security = write_security(tmp_path)
    settings = [f"sluice.security.{name}={value}" for name, value in security.items()]
    run_dir = make_run(tmp_path / "run", *settings)
    fill_run(run_dir)
    stop, reported = asyncio.Event(), asyncio.Queue[str]()
    async with asyncio.TaskGroup() as tasks:
        served = serve_page(run_dir, "0.0.0.0", 0, stop=stop, on_address=reported.put_nowait)
        tasks.create_task(served)
        try:
            async with asyncio.timeout(LONG_S):
                address = urlsplit(await reported.get())
            assert address.scheme == "https"
            url, ca_file = f"https://127.0.0.1:{address.port}", security["ca_file"]
            overview = f"{url}/api/overview"
            with pytest.raises(urllib.error.HTTPError, match=r"401"):
                await asyncio.to_thread(get, overview, ca_file)
            body = await asyncio.to_thread(get, overview, ca_file, CLIENT_TOKEN)
            assert b'"name":"run"' in body
            with pytest.raises(OSError):
                await asyncio.to_thread(get, overview.replace("https", "http"), ca_file)
        finally:
            stop.set()


async def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    security = write_security(tmp_path)
    settings = [f"sluice.security.{name}={value}" for name, value in security.items()]
    run_dir = make_run(tmp_path / "run", *settings)
    location = check_location(run_dir)
    Path(security["cert_file"]).write_text("no certificate", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sluice\.security\.cert_file = .*both PEM"):
        serving._tls_context(location.config.sluice.security)
