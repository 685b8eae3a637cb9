"""`sluice env`: try an environment of episodes without a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sluice.algorithm.episode_rules import (
    EpisodeRules,
    Observation,
    answer_message,
    truncate_tool_texts,
)
from sluice.environment.episodes import AuthorCalls, Environment, PlayedRow
from sluice.environment.loading import file_environment
from sluice.environment.source import EnvironmentSource
from sluice.safe_text import printable
from sluice.types import Answer, ChatMessage, FinishReason, ToolCall

_RULES = EpisodeRules(max_sequence_tokens=0)
_CUT = (
    f"(cut to {_RULES.max_tool_response_length} characters, as in a run; "
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=N keeps more)"
)

environment_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Try an environment without a run.\n\n"
    '\b\nExample:\n  sluice env check calculator.py --call \'calc {"expression": "47 * 38"}\'',
)


@environment_commands.callback()
def _environment() -> None:
    """Keep the name of the only command."""


@environment_commands.command("check")
def check(
    file: Annotated[
        Path,
        typer.Argument(help="Python file with a class or function, or verl's YAML of tools."),
    ],
    *,
    name: Annotated[str | None, typer.Option(help="Which class or function.")] = None,
    verl: Annotated[
        bool, typer.Option("--verl", help="The file has verl's function tools.")
    ] = False,
    prompt: Annotated[str, typer.Option(help="The row's prompt.")] = "Hello.",
    truth: Annotated[str, typer.Option(help="The row's ground_truth.")] = "",
    call: Annotated[
        list[str] | None,
        typer.Option(metavar="'TOOL JSON'", help="A call that the policy makes; may be repeated."),
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="An answer in text, after the calls; may be repeated."),
    ] = None,
) -> None:
    """Load a file as a run would, print its tools, and play one episode with the given answers.

    Loading reports each method that lacks type hints or a docstring. The exit code is 1 if the file
    cannot be used, or its own code fails.

    \b
    Examples:
      sluice env check calculator.py
      sluice env check calculator.py --call 'calc {"expression": "47 * 38"}' --answer 1786
      sluice env check tools.py --verl
      sluice env check tools.yaml
    """
    world = _load_environment(file, name, verl=verl)
    typer.echo(f"{world.name}: {len(world.tools)} tool{'' if len(world.tools) == 1 else 's'}")
    for tool in world.tools:
        typer.echo(printable(f"  {tool.name}: {tool.description}\n    {tool.parameters}"))
    answers = [Answer("", tool_calls=(_parse_call(call_text),)) for call_text in call or ()]
    answers += [Answer(answer_text) for answer_text in answer or ()]
    for line in asyncio.run(_play_episode(world, prompt, truth, answers)):
        typer.echo(printable(line))


def _load_environment(file: Path, name: str | None, *, verl: bool) -> Environment:
    if file.suffix in {".yaml", ".yml"}:
        return EnvironmentSource(tool_config_path=str(file)).load()
    if verl:
        return EnvironmentSource(function_tool_path=str(file)).load()
    return file_environment(str(file), name)


def _parse_call(text: str) -> ToolCall:
    name, _, arguments = text.partition(" ")
    return ToolCall(name, arguments or "{}", "call_0")


async def _play_episode(
    world: Environment, prompt: str, truth: str, answers: Sequence[Answer]
) -> list[str]:
    """Play an episode; return what happens, a line each."""
    row = {"data_source": "", "ground_truth": truth, "extra_info": {}}
    task = PlayedRow((ChatMessage("user", prompt),), row, 0)
    calls = AuthorCalls()
    conversation = [*task.messages]
    lines = [*_message_lines(conversation)]
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        episode = world.begin(task, calls, tasks)
        try:
            observation = await episode.open()
            lines += _observation_lines(observation, conversation)
            for answer in answers:
                if observation.done:
                    break
                conversation.append(answer_message(answer))
                lines += _message_lines(conversation[-1:])
                observation = await episode.step(answer, FinishReason.STOP)
                lines += _observation_lines(observation, conversation)
            scored = await episode.score() if answers else None
            if scored is not None:
                lines.append(f"score {scored.score:g}")
        except Exception as error:  # noqa: BLE001  raised below: the group would wrap it
            failure = error
        finally:
            await episode.close()
    calls.close()
    if failure is not None:
        raise failure
    return lines


def _observation_lines(observation: Observation, conversation: list[ChatMessage]) -> Iterator[str]:
    """Yield what the policy reads, and add it to `conversation`; of a whole conversation, what does
    not repeat that."""
    new_messages, uncut = truncate_tool_texts(observation.messages, _RULES), observation.messages
    if observation.is_whole:
        is_continued = list(new_messages[: len(conversation)]) == conversation
        if is_continued:
            new_messages, uncut = new_messages[len(conversation) :], uncut[len(conversation) :]
        if not is_continued:
            yield "a new root:"
            conversation.clear()
    conversation += new_messages
    yield from _message_lines(new_messages)
    if new_messages != uncut:
        yield _CUT
    if observation.reward is not None:
        yield f"reward {observation.reward:g}"
    if observation.done:
        yield "the episode is over"


def _message_lines(messages: Sequence[ChatMessage]) -> Iterator[str]:
    for message in messages:
        calls = [f"{call.name} {call.arguments}" for call in message.tool_calls]
        yield f"{message.role}: {' '.join([message.content, *calls]).strip()}"
