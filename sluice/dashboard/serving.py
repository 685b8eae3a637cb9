"""Serve the dashboard of a run, or export it as one file, with the run's data inside: that needs no
server and no network.
"""

from __future__ import annotations

import asyncio
import html
import re
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from sluice.concurrency.process import hold_file
from sluice.config.addresses import is_loopback, join_host_port
from sluice.config.rules.security import TOKEN_KEY
from sluice.config.schema.service import SecurityConfig
from sluice.config.schema.trainer import TrainerConfig
from sluice.dashboard.live_status import LiveStatus, check_location
from sluice.dashboard.page import USUAL_GROUPS, USUAL_POINTS, policy_source
from sluice.dashboard.run_data import RunData
from sluice.dashboard.sample_browser import SampleFilter
from sluice.errors import ConfigError
from sluice.report.run_record import METRICS_NAME
from sluice.rpc.ports import check_bindable
from sluice.security.token_file import TokenFile, TokenSource
from sluice.whole_file import write_whole

URL_NAME = "dashboard.url"
_MAX_CONNECTIONS, _SHUTDOWN_S = 64, 2.0
_NO_EXTRA = "dashboard: aiohttp is not installed; pip install 'sluice[dashboard]'"
_MAIN = "main.js"
_METRIC_POINTS = 120  # of each of some hundred metrics
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)


async def serve_page(
    run_dir: Path,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    on_address: Callable[[str], None],
    other_runs: Sequence[Path] = (),
) -> None:
    """Serve until `stop` is set; meanwhile `dashboard.url` in the folder holds the address.

    Args:
        run_dir: the run's folder.
        host: the interface to listen on.
        port: the port; 0 lets the system choose one.
        stop: ends the server.
        on_address: called with the address of the page.
        other_runs: folders of runs to show beside it.

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
    tokens = _token_source(security, host, is_local=is_local)
    tls = None if is_local else _tls_context(security)
    check_bindable(host, port)
    live = LiveStatus(run_dir)
    data = RunData(location.run_dir, location.config.trainer, other_runs=_check_folders(other_runs))
    page = DashboardPage(data, live, tokens, only_loopback=is_local)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(live.close)
        stack.callback(page.close)
        server = serve_http(
            page.app(),
            host,
            port,
            max_connections=_MAX_CONNECTIONS,
            shutdown_s=_SHUTDOWN_S,
            tls=tls,
        )
        bound = await stack.enter_async_context(server)
        url = f"{'https' if tls else 'http'}://{join_host_port(host, bound)}/"
        stack.enter_context(hold_file(run_dir / URL_NAME, f"{url}\n"))
        on_address(url)
        await stop.wait()


def write_report(run_dir: Path, file: Path, other_runs: Sequence[Path] = ()) -> None:
    """Write the page of a run as one file, with its data inside, beside `other_runs`.

    Raises:
        ConfigError: no run was started in the folder.
        OSError: a file cannot be read or written.
    """
    location = check_location(run_dir)
    export_page(location.run_dir, location.config.trainer, file, _check_folders(other_runs))


def _check_folders(folders: Sequence[Path]) -> Sequence[Path]:
    """Return the folders. Raises ConfigError for one without metrics."""
    for folder in folders:
        if not (folder / METRICS_NAME).is_file():
            raise ConfigError(
                f"compare: {folder} holds no {METRICS_NAME}; give the folder of a run that trained"
            )
    return folders


def _token_source(security: SecurityConfig, host: str, *, is_local: bool) -> TokenSource | None:
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


def export_page(
    run_dir: Path, trainer: TrainerConfig, file: Path, other_runs: Sequence[Path] = ()
) -> None:
    """Write the page with all numbers of the run and its newest groups.

    The same folder gives the same bytes.

    Args:
        run_dir: the run's folder.
        trainer: of its configuration.
        file: the file to write; others see the former one or the new one.
        other_runs: folders of runs to show beside it.

    Raises:
        OSError: a file cannot be read or written.
    """
    data = RunData(run_dir, trainer, other_runs=other_runs)
    while data.read():
        pass
    samples = data.samples(SampleFilter(), "", None, USUAL_GROUPS)
    metrics = data.metrics()
    answers = {
        "/api/overview": data.overview(None),
        "/api/curves": data.curves(USUAL_POINTS),
        "/api/comparison": data.comparison(),
        "/api/settings": data.settings(),
        "/api/runs": data.runs(_METRIC_POINTS),
        "/api/metrics": metrics,
        **{
            f"/api/metric?{urlencode({'name': metric['name']})}": data.metric(
                metric["name"], _METRIC_POINTS
            )
            for metric in metrics["metrics"]
        },
        "/api/samples?": {**samples, "next": None},  # the file holds no further groups
        **{f"/api/samples/{group['id']}": data.group(group["id"]) for group in samples["groups"]},
    }
    write_whole(file, _page_with_answers(run_dir.absolute().name, answers).encode())


def _page_with_answers(name: str, answers: dict[str, Any]) -> str:
    """Return the page with its styles, its scripts and `answers` inside."""
    static = files("sluice.dashboard") / "static"
    texts = {
        entry.name: entry.read_text(encoding="utf-8")
        for entry in static.iterdir()
        if not entry.name.endswith(".svg")
    }
    style = texts["uPlot.min.css"] + "\n" + texts["dashboard.css"]
    library, script = texts["uPlot.iife.min.js"], bundle(texts)
    policy = (
        f"default-src 'none'; style-src {policy_source(style)}; "
        f"script-src {policy_source(library)} {policy_source(script)}; "
        "base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # In JSON, "<" occurs within texts only. Escaped, no text can end the element.
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<!--\n{texts['uPlot.LICENSE.txt']}\n-->\n<style>{style}</style>\n"
    )
    body = (
        f'<script type="application/json" id="run-answers">{data}</script>\n'
        f"<script>{library}</script>\n<script>{script}</script>\n"
    )
    page = re.sub(r"<(?:link|script) [^>]*>(?:</script>)?\n", "", texts["index.html"])
    page = page.replace("<title>sluice</title>\n", f"<title>{html.escape(name)}</title>\n{head}")
    return page.replace("</body>", f"{body}</body>")


def bundle(texts: dict[str, str]) -> str:
    """Return the modules as one script, each as a function that returns what it exports.

    A file that is opened without a server cannot import modules from other files.

    Args:
        texts: the page's files by name.
    """
    parts: list[str] = []
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        for _, source in _IMPORT.findall(texts[name]):
            add(source)
        exported = ", ".join(_EXPORT.findall(texts[name]))
        body = _IMPORT.sub(lambda m: f"const {m[1]} = {_variable(m[2])};\n", texts[name])
        body = _EXPORT.sub("", body)
        parts.append(
            f"const {_variable(name)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"
        )

    add(_MAIN)
    return '"use strict";\n' + "".join(parts)


def _variable(file_name: str) -> str:
    return f"module_{file_name.removesuffix('.js')}"
