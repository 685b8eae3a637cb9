"""`sluice serve-openai`: serve the policy in training at an OpenAI-compatible HTTP address."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import connect_client
from sluice.cli.terminal import print_json
from sluice.client.run_address import locate_run
from sluice.concurrency.process import stop_on_signals
from sluice.config.addresses import join_host_port
from sluice.config.derived import max_model_len
from sluice.errors import ConfigError
from sluice.rpc.ports import check_bindable
from sluice.security.token_file import GivenToken, TokenFile, TokenSource

if TYPE_CHECKING:
    from sluice.openai_server.web_app import OpenAIServerSettings


KEY_VARIABLE = "SLUICE_OPENAI_KEY"
_CLIENT_NAME = "openai-front"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_openai(  # noqa: PLR0913 - one parameter per option
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0: the system chooses.")
    ] = 8000,
    model_name: Annotated[str, typer.Option(help="Model name in requests.")] = "policy",
    key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one per line; none: SLUICE_OPENAI_KEY.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Longest request in seconds; none: no limit.")
    ] = None,
    max_choices: Annotated[
        int, typer.Option(min=1, help="Maximum choices at once, over all requests.")
    ] = 4096,
    max_key_choices: Annotated[
        int, typer.Option(min=1, help="Maximum choices at once, for one API key.")
    ] = 2048,
    max_connections: Annotated[int, typer.Option(min=1, help="Maximum connections at once.")] = 512,
    max_priority: Annotated[
        int,
        typer.Option(
            min=-100,
            max=100,
            help=(
                "Highest priority of a request; training has 0. The run's "
                "sluice.limits.max_client_priority applies too."
            ),
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Serve the policy of a run over HTTP like OpenAI's API, for evaluation harnesses.

    Answers /v1/chat/completions, /v1/completions and /v1/models, streamed or not. The newest
    weights answer each request; system_fingerprint is their version. On other interfaces than
    loopback it requires an API key.

    \b
    Example:
      sluice serve-openai runs/quickstart --port 8000
    """
    if deadline is not None and not 0 < deadline < math.inf:
        raise ConfigError(f"--deadline {deadline}: give seconds above 0, or leave the option out")
    settings = _settings_class()(
        model_name,
        deadline,
        _key_source(host, key_file),
        max_choices,
        max_connections,
        max_key_choices=max_key_choices,
        max_priority=max_priority,
    )
    asyncio.run(_serve(named_run(run, run_option), host, port, settings, as_json=as_json))


def _settings_class() -> type[OpenAIServerSettings]:
    try:
        from sluice.openai_server.web_app import OpenAIServerSettings
    except ImportError as error:
        raise ConfigError(
            "serve-openai: aiohttp is not installed; pip install 'sluice[openai-front]'"
        ) from error
    return OpenAIServerSettings


def _key_source(host: str, key_file: Path | None) -> TokenSource | None:
    """Return the keys. Raises ConfigError for an open interface without one."""
    if key_file is not None:
        return TokenFile(key_file, "--key-file")
    key = os.environ.get(KEY_VARIABLE)
    if key is not None:
        return GivenToken(key, KEY_VARIABLE)
    if host not in _LOOPBACK:
        raise ConfigError(
            f"--host {host}: others could use it; give --key-file or {KEY_VARIABLE}, or listen on "
            "127.0.0.1"
        )
    return None


async def _serve(
    run: Path, host: str, port: int, settings: OpenAIServerSettings, *, as_json: bool
) -> None:
    from sluice.openai_server.web_app import OpenAIServer, listening

    check_bindable(host, port)
    settings = replace(settings, max_tokens=max_model_len(locate_run(run).config) - 1)
    stop = asyncio.Event()
    with stop_on_signals(stop):
        async with (
            connect_client(run, name=_CLIENT_NAME) as client,
            listening(OpenAIServer(client, settings), host, port) as bound,
        ):
            url = f"http://{join_host_port(host, bound)}/v1"
            if as_json:
                print_json({"url": url, "model": settings.model_name})
            else:
                typer.echo(f"serving {settings.model_name!r} at {url}")
            await stop.wait()
