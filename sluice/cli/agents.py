"""`sluice agents`: programs that know only an OpenAI URL work on a run's samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import RunArgument, RunOption, named_run
from sluice.cli.running_run import connected
from sluice.client.agents import AgentRunner, program_of
from sluice.concurrency.process import stop_on_signals
from sluice.errors import ConfigError

_CLIENT_NAME = "agents"

agent_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Let programs that know only an OpenAI URL work on a run's samples.\n\n"
    '\b\nExample:\n  sluice agents run runs/mine --command "python my_agent.py" --parallel 32',
)


@agent_commands.callback()
def _agents() -> None:
    """Keep the name of the only command."""


@agent_commands.command("run")
def run_agents(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    command: Annotated[str, typer.Option(help="The program, with its arguments.")],
    parallel: Annotated[int, typer.Option(min=1, max=500, help="Most programs at once.")] = 32,
) -> None:
    """Start a program for each sample of a run with sluice.environment.agents=true.

    A program finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, and its
    task as one line of JSON on its standard input. If the last line that it prints is JSON such as
    {"reward": 1.0}, that is the sample's reward; otherwise the row's scorer grades the last answer.
    With another exit code than 0 the sample has failed. The command ends with the run.

    \b
    Example:
      sluice agents run runs/mine --command "python my_agent.py" --parallel 32
    """
    program_of(command)
    asyncio.run(_run(named_run(run, run_option), command, parallel))


async def _run(run: Path, command: str, parallel: int) -> None:
    try:
        from sluice.openai_front.web_app import FrontSettings, OpenAIFront, listening
    except ImportError as error:
        raise ConfigError(
            "agents run: aiohttp is not installed; pip install 'sluice[openai-front]'"
        ) from error
    stop = asyncio.Event()
    with stop_on_signals(stop):
        async with (
            connected(run, name=_CLIENT_NAME) as client,
            listening(OpenAIFront(client, FrontSettings()), "127.0.0.1", 0) as port,
            asyncio.TaskGroup() as tasks,
        ):
            url = f"http://127.0.0.1:{port}"
            runner = AgentRunner(client.leases(), command, parallel, url, typer.echo)
            typer.echo(f"agents of {run} call {url}")
            working = tasks.create_task(runner.run(), name="agents")
            stopping = tasks.create_task(stop.wait(), name="signals")
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            stopping.cancel()
    typer.echo(f"ended: {runner.counts}")
