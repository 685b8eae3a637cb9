"""Store the finished prompts of a stand-alone evaluation on disk, so that it can continue after a
kill.

``responses/<benchmark>.jsonl`` in the run's folder gets a line for each finished prompt. A prompt
with a failed sample is sampled again at the next start, since a kill may be the cause.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.algorithm.validation_metrics import ValidationPrompt
from sluice.data.prompt_files import PromptFiles
from sluice.errors import DataError
from sluice.evaluation.stored_responses import (
    FOLDER_NAME,
    StoredMessage,
    StoredPrompt,
    StoredSample,
    read_responses,
)
from sluice.safe_text import encodable
from sluice.telemetry.samples import transcript
from sluice.types import Outcome, Prompt, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class BenchmarkFile:
    """One benchmark: the position of its first row in the validation set, and its responses."""

    start: int
    responses: Path


class PromptStore:
    """The files of one evaluation.

    Args:
        benchmarks: in the order of their rows.
    """

    def __init__(self, benchmarks: Sequence[BenchmarkFile]) -> None:
        self._benchmarks = benchmarks
        self._starts = [benchmark.start for benchmark in benchmarks]
        self._one_at_a_time = asyncio.Lock()

    def load_finished(self, num_samples: int) -> Mapping[int, ValidationPrompt]:
        """Return the finished prompts by position in the validation set; drop all others.

        Delete lines that a kill cut short, or that have a failed sample or another number of
        samples: their prompts are sampled again.

        Raises:
            DataError: a line is damaged, or a file cannot be read or written.
        """
        prompts: dict[int, ValidationPrompt] = {}
        for benchmark in self._benchmarks:
            try:
                benchmark.responses.parent.mkdir(parents=True, exist_ok=True)
                if benchmark.responses.exists():
                    prompts.update(_load_finished(benchmark, num_samples))
            except OSError as error:
                raise _unusable(benchmark.responses, error) from error
        return prompts

    async def add(
        self, prompt: Prompt, group: RolloutGroup | None, outcomes: Sequence[Outcome]
    ) -> None:
        """Store a finished prompt.

        Args:
            group: its samples; ``None`` if none could be generated.

        Raises:
            DataError: the file cannot be written.
        """
        assert prompt.position is not None
        benchmark = self._benchmarks[bisect_right(self._starts, prompt.position) - 1]
        line = _line(prompt, prompt.position - benchmark.start, group, outcomes)
        async with self._one_at_a_time:
            await asyncio.to_thread(_append, benchmark.responses, line)


def open_store(run_dir: Path, names: Sequence[str], files: PromptFiles) -> PromptStore:
    """Return the store of an evaluation.

    Raises:
        DataError: a file has no rows.
    """
    starts: dict[str, int] = {}
    for block in files.blocks:
        starts.setdefault(block.path, block.start)
    if len(starts) < len(names):
        raise DataError(
            f"sluice.evaluation.benchmarks = {', '.join(names)}: only {', '.join(starts)} have "
            "rows; leave out the files without"
        )
    folder = run_dir / FOLDER_NAME
    return PromptStore(
        [
            BenchmarkFile(start, folder / f"{name}.jsonl")
            for name, start in zip(names, starts.values(), strict=True)
        ]
    )


def _load_finished(benchmark: BenchmarkFile, num_samples: int) -> Mapping[int, ValidationPrompt]:
    file, prompts, num_bytes = benchmark.responses, {}, 0
    draft = file.with_name(f".{file.name}.draft")
    with draft.open("wb") as draft_file:
        for _, prompt in read_responses(file):
            scores = tuple(
                score for sample in prompt.samples if (score := sample.scored) is not None
            )
            if len(scores) == len(prompt.samples) == num_samples:
                position = benchmark.start + prompt.position
                prompts[position] = ValidationPrompt(prompt.data_source, scores)
                num_bytes += draft_file.write(msgspec.json.encode(prompt) + b"\n")
    if num_bytes == file.stat().st_size:
        draft.unlink()
    else:
        os.replace(draft, file)
    return prompts


def _line(
    prompt: Prompt, position: int, group: RolloutGroup | None, outcomes: Sequence[Outcome]
) -> bytes:
    rollouts = group.rollouts if group is not None else ()
    samples = [
        _sample(rollout, outcome) for rollout, outcome in zip(rollouts, outcomes, strict=False)
    ]
    samples += [StoredSample("").graded(failed) for failed in outcomes[len(samples) :]]
    stored = StoredPrompt(
        position,
        prompt.data_source,
        samples,
        [StoredMessage(turn.role, turn.content) for turn in prompt.messages],
        prompt.truth,
        dict(prompt.extra_info),
    )
    return msgspec.json.encode(stored, enc_hook=str) + b"\n"


def _sample(rollout: Rollout, outcome: Outcome) -> StoredSample:
    grades_response = len(rollout.turns) == 1 or rollout.whole_text is not None
    sample = StoredSample(
        response=encodable(transcript(rollout)),
        tokens=rollout.num_tokens,
        finish_reason=rollout.finish_reason.value,
        turns=len(rollout.turns),
        last_turn=None if grades_response else encodable(rollout.text),
        is_graded_by_environment=rollout.outcome is not None,
    )
    return sample.graded(outcome)


def _append(file: Path, line: bytes) -> None:
    try:
        with file.open("ab") as opened:
            opened.write(line)
    except OSError as error:
        raise _unusable(file, error) from error


def _unusable(file: Path, error: OSError) -> DataError:
    return DataError(
        f"{file}: {error.strerror or error}; free the disk or the folder, and start the "
        "evaluation again: it continues"
    )
