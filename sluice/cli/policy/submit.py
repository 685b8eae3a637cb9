"""`sluice submit`: submit prompts to a run, to be trained on."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from sluice.algorithm.episode_rules import AGENT_NAME
from sluice.cli.arguments import AsJsonLines, RunArgument, RunOption, named_run
from sluice.cli.running_run import connect_client
from sluice.cli.terminal import print_json, print_line, progress_bars
from sluice.client.generation_types import Image
from sluice.client.submission import NewPrompt, PromptEvent
from sluice.data.image_sources import image_source
from sluice.data.prompt_rows import UNREAD_KEYS, UNREAD_MEDIA, media_error
from sluice.data.row_files import read_rows
from sluice.errors import DataError
from sluice.safe_text import printable
from sluice.types import ChatMessage

_NEEDS = (
    "prompt ([{role, content}]), data_source and ground_truth (or reward_model.ground_truth), each "
    "a text; prompt_id, extra_info, agent_name and images (paths, data: URIs or {bytes, path}) are "
    "optional"
)
_STEM_LENGTH, _DIGEST_BYTES = 64, 8


class _PromptTurn(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    tool_calls: Any = None
    reasoning_content: Any = None


class _RewardModel(msgspec.Struct):
    ground_truth: str


class _SubmittedRow(msgspec.Struct):
    prompt: list[_PromptTurn]
    data_source: str
    ground_truth: str | None = None
    reward_model: _RewardModel | None = None
    prompt_id: str | None = None
    extra_info: dict[str, Any] | None = None
    images: list[Any] | None = None
    agent_name: str | None = None
    videos: Any = None
    audios: Any = None


def read_prompts(file: Path) -> list[NewPrompt]:
    """Read prompts to submit: JSON lines or parquet, as for training, or with `ground_truth` flat.

    A row without `prompt_id` gets one from the file's name, the row's place and its content: the
    same file always gives the same prompts.

    Raises:
        DataError: with the file, the line or row, and the problem, such as the id of an earlier row
            with other content.
    """
    prompts: list[NewPrompt] = []
    by_id: dict[str, NewPrompt] = {}
    for place, row in read_rows(file, _SubmittedRow, _NEEDS):
        prompt = _prompt(file, place, row)
        if by_id.setdefault(prompt.prompt_id, prompt) != prompt:
            raise DataError(
                f"{file}, {place}: an earlier row with other content has the prompt_id "
                f"{prompt.prompt_id!r}; give each prompt its own"
            )
        prompts.append(prompt)
    return prompts


def _prompt(file: Path, place: str, row: _SubmittedRow) -> NewPrompt:
    answer = row.ground_truth
    if answer is None:
        if row.reward_model is None:
            raise DataError(f"{file}, {place}: no ground_truth; a row needs {_NEEDS}")
        answer = row.reward_model.ground_truth
    for turn in row.prompt:
        if unread_keys := [key for key in UNREAD_KEYS if getattr(turn, key)]:
            raise DataError(
                f"{file}, {place}: 'prompt' holds a message with {unread_keys[0]}; remove it"
            )
    for name in UNREAD_MEDIA:
        if getattr(row, name):
            raise media_error(f"{file}, {place}", name)
    agent = {AGENT_NAME: row.agent_name} if row.agent_name else {}
    return NewPrompt(
        row.prompt_id or _derived_id(file, place, row),
        tuple(ChatMessage(turn.role, turn.content) for turn in row.prompt),
        row.data_source,
        answer,
        {**(row.extra_info or {}), **agent},
        tuple(_image(file, place, index, image) for index, image in enumerate(row.images or ())),
    )


def _image(file: Path, place: str, index: int, image: object) -> Image:
    """Return the bytes of an image, or its path; relative paths start at the file's folder."""
    try:
        source = image_source(image)
    except ValueError as error:
        raise DataError(f"{file}, {place}: images[{index}] {error}") from error
    return source if isinstance(source, bytes) else file.parent / source


def _derived_id(file: Path, place: str, row: _SubmittedRow) -> str:
    fields = msgspec.structs.asdict(row)
    # Without them the ids of earlier releases stay.
    for newer in ("images", AGENT_NAME, *UNREAD_MEDIA):
        if not fields[newer]:
            del fields[newer]
    digest = hashlib.blake2b(msgspec.json.encode(fields), digest_size=_DIGEST_BYTES).hexdigest()
    stem = "".join(c if c.isascii() and c.isprintable() else "_" for c in file.stem[:_STEM_LENGTH])
    return f"{stem}:{place.replace(' ', '-')}:{digest}"


def submit(
    file: Annotated[Path, typer.Argument(help="JSON lines or parquet, one prompt per row.")],
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait for the outcomes too.")] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Submit prompts for training. Accepted prompts are trained on or filtered, never lost.

    \b
    A line of the file, wrapped here; prompt_id, extra_info, agent_name and images are optional:
      {"prompt_id": "a1", "data_source": "math_dapo", "ground_truth": "9",
       "prompt": [{"role": "user", "content": "<image>What is 2 + 3 + 4?"}],
       "images": ["sum.png"]}

    Images are paths relative to the file, or data: URIs; each belongs to one <image> in the texts.
    Parquet files have the columns of a training set. You may interrupt and repeat the command: no
    prompt is accepted twice, and outcomes are printed again. While the queue is full, prompts
    wait: with --watch without a limit, otherwise until a minute passes without progress. The exit
    code is 1 if a prompt was refused.

    \b
    Example:
      sluice submit prompts.jsonl --watch
    """
    prompts = read_prompts(file)
    folder = named_run(run, run_option)
    if asyncio.run(_submit(folder, prompts, watch=watch, as_json=as_json)):
        raise typer.Exit(1)


async def _submit(run: Path, prompts: Sequence[NewPrompt], *, watch: bool, as_json: bool) -> int:
    """Print the events of the prompts, then their counts; return how many were refused."""
    console, counts = Console(stderr=True), Counter[str]()
    try:
        with progress_bars(console, is_transient=True) as bars:
            bar = bars.add_task("submitting", total=len(prompts))
            async with (
                connect_client(run) as client,
                aclosing(client.submit(prompts, until_outcome=watch)) as events,
            ):
                async for event in events:
                    counts[event.event] += 1
                    if as_json:
                        print_json(_as_object(event))
                    else:
                        typer.echo(printable(_event_line(event)))
                    is_last = event.event == "refused" or watch == (event.event != "accepted")
                    bars.update(bar, description=summary(counts), advance=int(is_last))
    finally:
        print_line(console, summary(counts))
    return counts["refused"]


def summary(counts: Counter[str]) -> str:
    """Return counts such as ``120 accepted, 80 trained, 40 filtered_all_right``."""
    return ", ".join(f"{count} {event}" for event, count in counts.items()) or "no answer"


def _event_line(event: PromptEvent) -> str:
    step = "" if event.step is None else f" in step {event.step}"
    rewards = f" rewards {list(event.rewards)}" if event.rewards else ""
    detail = f": {event.detail}" if event.detail else ""
    return f"{event.prompt_id} {event.event}{step}{rewards}{detail}"


def _as_object(event: PromptEvent) -> dict[str, object]:
    fields = asdict(event)
    del fields["is_retryable"]
    return fields
