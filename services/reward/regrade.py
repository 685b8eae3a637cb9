"""Grade the stored responses of an evaluation again: ``python -m services.reward.regrade DIR``.

The scorers, limits and processes are those of the reward service, as set by the evaluation's
configuration and the overrides after DIR. Each line on standard output gives the number of prompts
graded since the previous line. The response files are replaced at the end, one by one: a process
killed before that changes nothing; if killed during that, all are graded again. Each sample keeps
its earlier grades.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.reward.grading.grader import Grader, overlong_shaping
from services.reward.grading.pool import running_scorer_pool
from services.reward.groups.settings import outcome_policy
from sluice.concurrency.process import end_with_supervisor, exit_status
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.data.prompt_rows import truth_text
from sluice.evaluation.stored_responses import (
    StoredPrompt,
    StoredSample,
    read_responses,
    response_files,
)
from sluice.service_contract import CONFIG_NAME
from sluice.types import (
    ChatMessage,
    FailureKind,
    FinishReason,
    Prompt,
    PromptOrigin,
    Rollout,
    VersionSpan,
    absent_logprobs,
    absent_tokens,
)

_PROMPTS_AT_ONCE = 64
_OF_SCORERS = (FailureKind.UNSCORABLE, FailureKind.SCORER_TIMEOUT, FailureKind.SCORER_CRASH)


async def regrade_all(folder: Path, config: RunConfig) -> None:
    """Grade all stored responses and replace their files.

    Raises:
        ConfigError: the scorer cannot be loaded.
        DataError: there are no responses, or a line is damaged.
        OSError: a file cannot be read or written.
    """
    drafts: dict[Path, Path] = {}
    shaping = overlong_shaping(config.reward, config.data.max_response_length)
    try:
        async with running_scorer_pool(config.reward, config.sluice.sandbox, folder) as pool:
            grader = Grader(pool, shaping, outcome_policy(config))
            for file in response_files(folder).values():
                drafts[file] = file.with_name(f".{file.name}.{os.getpid()}.draft")
                with drafts[file].open("wb") as draft:
                    await _regrade_file(grader, file, draft)
        for file, path in drafts.items():
            os.replace(path, file)
    finally:
        for path in drafts.values():
            path.unlink(missing_ok=True)


async def _regrade_file(grader: Grader, file: Path, draft: BinaryIO) -> None:
    prompts = (prompt for _, prompt in read_responses(file))
    while batch := await asyncio.to_thread(_next, prompts):
        async with asyncio.TaskGroup() as tasks:
            graded = [
                tasks.create_task(_regrade(grader, stored), name=f"prompt {stored.position}")
                for stored in batch
            ]
        for task in graded:
            draft.write(msgspec.json.encode(task.result()) + b"\n")
        print(len(batch), flush=True)  # noqa: T201 - the caller counts


def _next(prompts: Iterator[StoredPrompt]) -> list[StoredPrompt]:
    return list(islice(prompts, _PROMPTS_AT_ONCE))


async def _regrade(grader: Grader, stored: StoredPrompt) -> StoredPrompt:
    """Return the prompt with new outcomes, failures too, of the samples that scorers grade."""
    chosen = [number for number, sample in enumerate(stored.samples) if _is_for_scorers(sample)]
    prompt = _prompt(stored)
    rollouts = [_rollout(number, stored.samples[number]) for number in chosen]
    outcomes = await grader.outcomes(prompt, rollouts)
    samples = list(stored.samples)
    for number, outcome in zip(chosen, outcomes, strict=True):
        old_sample = samples[number]
        samples[number] = msgspec.structs.replace(
            old_sample.graded(outcome), earlier=[*old_sample.earlier, old_sample.grade]
        )
    return msgspec.structs.replace(stored, samples=samples)


def _is_for_scorers(sample: StoredSample) -> bool:
    """Return whether a scorer graded the response or failed to. Other responses were never
    generated, or only their environment can grade them."""
    if sample.is_graded_by_environment:
        return False
    return sample.failure is None or sample.failure.startswith(_OF_SCORERS)


def _prompt(stored: StoredPrompt) -> Prompt:
    truth = stored.ground_truth
    text = truth_text(truth)
    return Prompt(
        prompt_id=f"position {stored.position}",
        sequence=stored.position,
        messages=tuple(ChatMessage(message.role, message.content) for message in stored.prompt),
        data_source=stored.data_source,
        ground_truth="null" if text is None else text,
        origin=PromptOrigin.DATASET,
        position=stored.position,
        extra_info=stored.extra_info if isinstance(stored.extra_info, dict) else {},
        truth_is_json=not isinstance(truth, str),
    )


def _rollout(number: int, sample: StoredSample) -> Rollout:
    """Return the sample with its text, length and number of turns; tokens are not stored."""
    finish = FinishReason.STOP
    with suppress(ValueError):
        finish = FinishReason(sample.finish_reason)
    count = sample.tokens
    one_turn = Rollout.of_one_turn(
        number,
        absent_tokens(count),
        absent_logprobs(count),
        (VersionSpan(0, 0, count),) if count else (),
        finish,
        sample.response if sample.last_turn is None else sample.last_turn,
    )
    # Graders read the number of turns and the longest path. As many roots as turns give the right
    # number and keep the longest path at the sample's tokens.
    return replace(one_turn, turns=one_turn.turns * max(sample.turns, 1))


def main(argv: Sequence[str]) -> None:
    """Regrade as the command line asks."""
    parser = argparse.ArgumentParser(
        prog="python -m services.reward.regrade",
        description="Grades the stored responses of an evaluation again.",
        epilog="example: python -m services.reward.regrade runs/eval reward.num_workers=4",
    )
    parser.add_argument("folder", type=Path, help="of the evaluation")
    parser.add_argument("overrides", nargs="*", help="key=value, as in verl")
    arguments = parser.parse_args(argv)
    end_with_supervisor()
    config = load_config(arguments.folder / CONFIG_NAME, arguments.overrides)
    asyncio.run(regrade_all(arguments.folder, config))


if __name__ == "__main__":
    sys.exit(exit_status("sluice", lambda: main(sys.argv[1:])))
