"""`sluice agents`: programs that know only an OpenAI URL work on a run's samples."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import RunArgument, RunOption, named_run
from sluice.cli.running_run import ask_run, connect_client, past_run
from sluice.client.agent_program import program_of
from sluice.client.agents import AgentRunner
from sluice.client.run_address import locate_run
from sluice.concurrency.process import stop_on_signals
from sluice.concurrency.waits import run_unless
from sluice.errors import ConfigError, NotReadyError, SluiceError
from sluice.service_contract import CONFIG_NAME

_CLIENT_NAME, _LOOK_S = "agents", 1.0
_EXAMPLES = """\b
Examples:
  sluice agents run runs/mine --command "python my_agent.py" --parallel 32
  sluice agents run --command "node agent.mjs" --wait-s 600
"""

agent_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help=f"Let programs that know only an OpenAI URL work on a run's samples.\n\n{_EXAMPLES}",
)


@agent_commands.callback()
def _agents() -> None:
    """Keep the name of the only command."""


@agent_commands.command("run", epilog=_EXAMPLES)
def run_agents(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    command: Annotated[str, typer.Option(help="The program, with its arguments.")],
    parallel: Annotated[int, typer.Option(min=1, max=500, help="Maximum programs at once.")] = 32,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait-s", min=0.0, help="Seconds to wait for a run that is not up or does not answer."
        ),
    ] = 300.0,
) -> None:
    """Start a program for each sample of a run with sluice.environment.agents=true.

    A program finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, and its
    task as one line of JSON on its standard input. If the last line that it prints is JSON such as
    {"reward": 1.0}, that is the sample's reward; otherwise the row's scorer grades the last answer.
    With an exit code other than 0 the sample fails. The command ends with the run. If you interrupt
    it, open samples fail, and it ends the programs by SIGTERM, then SIGKILL.
    """
    program_of(command)
    asyncio.run(_run(named_run(run, run_option), command, parallel, wait_s))


async def _run(run: Path, command: str, parallel: int, wait_s: float) -> None:
    try:
        from sluice.openai_server.web_app import OpenAIServer, OpenAIServerSettings, listening
    except ImportError as error:
        raise ConfigError(
            "agents run: aiohttp is not installed; pip install 'sluice[openai-front]'"
        ) from error
    stop = asyncio.Event()
    with stop_on_signals(stop):
        await run_unless(stop, _wait_until_up(run, wait_s))
        if stop.is_set():
            return
        async with (
            connect_client(run, name=_CLIENT_NAME) as client,
            listening(OpenAIServer(client, OpenAIServerSettings()), "127.0.0.1", 0) as port,
        ):
            url = f"http://127.0.0.1:{port}"
            runner = AgentRunner(
                client.leases(),
                command,
                parallel,
                url,
                typer.echo,
                partial(_has_ended, run),
                wait_s,
            )
            typer.echo(f"agents of {run} call {url}")
            await run_unless(stop, runner.run())
    typer.echo(f"ended: {runner.counts}")


async def _wait_until_up(run: Path, wait_s: float) -> None:
    """Wait until a run's trainer answers; print for what.

    Raises:
        NotReadyError: the run has ended, or is not up in time.
        SluiceError: its configuration or its credentials cannot be used.
    """
    loop = asyncio.get_running_loop()
    give_up_s, printed_reason = loop.time() + wait_s, ""
    while (reason := await _missing_reason(run)) is not None:
        left_s = give_up_s - loop.time()
        if reason != printed_reason:
            printed_reason = reason
            typer.echo(f"waiting up to {max(0.0, left_s):.0f} s for {run}: {reason}")
        if left_s <= 0:
            raise NotReadyError(f"run: {run} was not up within --wait-s {wait_s:g}: {reason}")
        await asyncio.sleep(_LOOK_S)


async def _missing_reason(run: Path) -> str | None:
    """Return why a run cannot lease samples yet; ``None``: it can."""
    try:
        location, _ = await ask_run(run)
    except ConfigError:
        if _is_started(run):
            raise
        return "nothing was started there yet"
    except NotReadyError as error:
        if (await past_run(locate_run(run).run_dir)).phase == "finished":
            raise
        return str(error).splitlines()[0]
    if not location.config.sluice.environment.agents:
        raise ConfigError(
            f"sluice.environment.agents: false in {run}, "
            "so it leases no samples; start it with true"
        )
    return None


def _is_started(run: Path) -> bool:
    return (run / CONFIG_NAME).is_file() or run.is_file()


async def _has_ended(run: Path) -> bool:
    """Return whether a run's trainer is gone after the run's last step."""
    try:
        await ask_run(run)
    except NotReadyError:
        return (await past_run(locate_run(run).run_dir)).phase == "finished"
    except SluiceError:
        return False
    return False
