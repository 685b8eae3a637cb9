"""`sluice generate`: sample from the policy in training."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import AsJsonLines, Deadline, RunArgument, RunOption, named_run
from sluice.cli.running_run import connect_client
from sluice.cli.terminal import print_json
from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import (
    MAX_SAMPLES,
    ChatWithImages,
    GenerateOptions,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
    Sampling,
)
from sluice.errors import DataError, InvalidRequestError
from sluice.safe_text import printable
from sluice.types import IMAGE_MARK, ChatMessage, Rollout

_STDIN = "-"


_Images = Annotated[
    list[Path] | None,
    typer.Option(help="A PNG, JPEG or WebP file for an <image> in the prompt; repeatable."),
]
_TopK = Annotated[int, typer.Option(help="Sample from this many most probable tokens; -1: all.")]
_Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends a response, without being part of it; repeatable."),
]
_Budget = Annotated[
    int, typer.Option(min=0, help="Maximum tokens of all responses together; 0: no limit.")
]


def generate(  # noqa: PLR0913 - one parameter per option
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from stdin.")],
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    n: Annotated[int, typer.Option("-n", min=1, max=MAX_SAMPLES, help="Responses.")] = 1,
    system: Annotated[str, typer.Option(help="A system message before the prompt.")] = "",
    image: _Images = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text, after its BOS: no chat template.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass in (0, 1].")] = 1.0,
    top_k: _TopK = -1,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Longest response in tokens; 0: the context.")
    ] = 0,
    stop: _Stop = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Fixes the randomness.")] = None,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Higher priorities come first; training has 0.")
    ] = 0,
    deadline: Deadline = None,
    token_budget: _Budget = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show the first response while it is generated.")
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Sample responses from the replicas of a running run.

    The least busy replica takes the prompt. If it dies, another one continues from the received
    tokens. Ctrl-C cancels the samples. Images come first if the prompt has no <image>.

    \b
    Examples:
      sluice generate "What is 2 + 6 + 9? End with 'Answer: N'." -n 4
      sluice generate "Count to five." --stream --temperature 0 --deadline 30
      sluice generate "Q: What is 2 + 2? A:" --raw --stop "Q:" --stop "END"
      sluice generate "<image>How many circles are there?" --image shapes.png
    """
    options = GenerateOptions(
        n=n,
        sampling=Sampling(temperature, top_p, top_k, max_tokens, seed, stop=tuple(stop or ())),
        priority=priority,
        deadline_s=deadline,
        token_budget=token_budget,
    )
    text = _read_stdin() if prompt == _STDIN else prompt
    if raw and image:
        raise InvalidRequestError(
            "--image: cannot be used with --raw, because the chat template places images"
        )
    conversation: Prompt = text if raw else _conversation(system, text, image or [])
    asyncio.run(
        _generate(named_run(run, run_option), conversation, options, as_json=as_json, stream=stream)
    )


def _conversation(system: str, text: str, images: list[Path]) -> Prompt:
    if images and IMAGE_MARK not in text:
        text = IMAGE_MARK * len(images) + text
    turns = [ChatMessage("system", system)] if system else []
    turns.append(ChatMessage("user", text))
    return ChatWithImages(turns, images) if images else turns


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"stdin: not text in {error.encoding} ({error.reason}); give it in that encoding"
        ) from error


async def _generate(
    run: Path, prompt: Prompt, options: GenerateOptions, *, as_json: bool, stream: bool
) -> None:
    async with connect_client(run) as client:
        if stream and not as_json:
            await _show_stream(client, prompt, options)
            return
        for rollout in (await client.generate(prompt, options)).rollouts:
            if as_json:
                print_json(_as_object(rollout))
            else:
                typer.echo(_text(rollout))


async def _show_stream(client: AsyncClient, prompt: Prompt, options: GenerateOptions) -> None:
    async with aclosing(client.stream(prompt, options)) as events:
        async for event in events:
            match event:
                case SampleDelta(sample_index=0):
                    typer.echo(_printable_text(event.text), nl=False)
                case SampleFinished(rollout) if rollout.sample_index == 0:
                    typer.echo()
                case SampleFinished(rollout):
                    typer.echo(_text(rollout))
                case GenerationStarted(moved_because=reason) if reason:
                    typer.echo(f"\ncontinued by {event.replica}: {printable(reason)}", err=True)


def _text(rollout: Rollout) -> str:
    spans = ", ".join(f"{span.version}" for span in rollout.version_spans)
    head = f"[{rollout.sample_index}] version {spans} ({rollout.finish_reason})"
    return f"{head}\n{_printable_text(rollout.text)}"


def _printable_text(text: str) -> str:
    """Return the text for a pipe as it is; a terminal would obey its escape sequences."""
    return printable(text) if sys.stdout.isatty() else text


def _as_object(rollout: Rollout) -> dict[str, object]:
    return {
        "index": rollout.sample_index,
        "text": rollout.text,
        "finish_reason": rollout.finish_reason.value,
        "token_ids": rollout.token_ids.tolist(),
        "logprobs": rollout.behavior_logprobs.tolist(),
        "versions": [[span.version, span.start, span.end] for span in rollout.version_spans],
    }
